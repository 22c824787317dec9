"""Tests of bloomery.parallel."""
