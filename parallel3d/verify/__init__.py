"""Compare a config on every mesh with plain transformers, on this machine."""
