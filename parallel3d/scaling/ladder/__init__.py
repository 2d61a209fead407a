"""A ladder of runs: planned from one file, run through launch/train.py (floor 0)."""
