"""A ladder of runs for scaling laws: planned from one file, run through launch/train.py."""
