"""Tests of bloomery.layers."""
