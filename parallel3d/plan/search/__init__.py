"""What there is to choose from, and the best of it."""
