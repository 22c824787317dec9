"""Tests of bloomery.families."""
