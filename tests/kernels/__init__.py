"""Tests of bloomery.kernels."""
