"""Bytes of each pipeline coordinate at its fullest moment."""
