"""Tests of bloomery.structured."""
