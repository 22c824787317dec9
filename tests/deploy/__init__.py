"""Tests of what is shipped: wheels, images, kernels of other processors."""
