"""Golden files and the scripts that write them."""
