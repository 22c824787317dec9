"""The compute tower's own side of a step: rows, batches, the cache, sampling, and the worker that joins them."""
