"""End-to-end tests with the embedded model."""
