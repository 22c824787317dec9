"""Tests of bloomery.attention."""
