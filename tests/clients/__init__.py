"""Tests with the client libraries of other projects."""
