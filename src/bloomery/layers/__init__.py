"""The layers of a decoder. A layer knows its spec and weights; never a family, file or batch."""
