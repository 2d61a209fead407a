"""Bytes that a rank of each pipeline coordinate holds at its fullest moment."""
