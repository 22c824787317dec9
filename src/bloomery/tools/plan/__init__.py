"""`bloomery plan MODEL`: where a model fits and how fast it runs, before a weight is read."""
