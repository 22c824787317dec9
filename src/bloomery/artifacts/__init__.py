"""Model files: where they are and what their headers declare. No torch: the API server uses it."""
