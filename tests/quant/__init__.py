"""Tests of bloomery.quant."""
