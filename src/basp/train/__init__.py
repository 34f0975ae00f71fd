"""Training: configuration, the loop, and starting ranks."""
