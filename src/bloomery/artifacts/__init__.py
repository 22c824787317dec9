"""What a model is on disk: where it lies, and what its files claim to hold. Both towers read it, so: no torch."""
