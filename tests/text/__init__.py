"""Tests of bloomery.text."""
