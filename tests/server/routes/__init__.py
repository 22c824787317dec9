"""Tests of bloomery.server.routes."""
