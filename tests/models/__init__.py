"""Tests of bloomery.models."""
