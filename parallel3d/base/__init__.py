"""Helpers that every package may use: errors, files, locks, terminal (no torch, no config)."""
