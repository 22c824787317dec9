"""The layers of a decoder. A layer has a spec and weights; it knows no family, file or batch."""
