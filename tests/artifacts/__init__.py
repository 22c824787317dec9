"""Tests of bloomery.artifacts."""
