"""The worker: runs scheduled steps on one device. It knows tensors and rows, but no scheduling."""
