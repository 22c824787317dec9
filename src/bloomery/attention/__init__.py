"""Attention over a paged cache: one protocol, several backends that say why not, one oracle."""
