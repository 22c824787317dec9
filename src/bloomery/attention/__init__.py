"""Attention over the paged KV cache: one protocol, three backends, and their selection."""
