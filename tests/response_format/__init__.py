"""Tests of response formats."""
