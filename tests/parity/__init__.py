"""Comparison with transformers: tiny random models with copied weights."""
