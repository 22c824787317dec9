"""Tests of bloomery.engine."""
