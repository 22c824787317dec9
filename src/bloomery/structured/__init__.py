"""Structured output: from what a user asks for to a grammar, and from a grammar to token masks."""
