"""A training run from its start to its end: folder, corpus, steps, metrics, requests to stop."""
