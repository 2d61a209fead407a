"""Proves a user's own config on this machine: every mesh against plain transformers."""
