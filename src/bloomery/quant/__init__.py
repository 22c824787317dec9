"""Weight formats: how checkpoints store linear layers, and what multiplies by them."""
