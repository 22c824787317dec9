"""Checkpoint and spec become a decoder that runs."""
