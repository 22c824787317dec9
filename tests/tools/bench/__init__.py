"""Tests of bloomery.tools.bench."""
