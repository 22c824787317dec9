"""Ranks that work as one: how they meet, and what they say to each other. Knows no model and no layer."""
