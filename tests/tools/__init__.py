"""Tests of bloomery.tools."""
