"""Tests of bloomery.native."""
