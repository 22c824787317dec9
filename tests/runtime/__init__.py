"""Tests of bloomery.runtime."""
