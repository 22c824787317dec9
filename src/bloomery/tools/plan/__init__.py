"""`bloomery plan MODEL`: what fits where, how fast it could be and should be, before a weight is read."""
