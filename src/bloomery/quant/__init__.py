"""Weight formats: how checkpoints store linear layers, and how products with them are computed."""
