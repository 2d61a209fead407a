"""A training run: its folder, corpus, steps, metrics, and requests to stop."""
