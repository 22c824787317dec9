"""Tests of bloomery.server."""
