"""The pieces a decoder is made of. A layer knows its spec and its weights; never a family, a file or a batch."""
