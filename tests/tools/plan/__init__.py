"""Tests of bloomery.tools.plan."""
