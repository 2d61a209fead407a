"""Checkpoints of other programs: readers that run no foreign code, and our checkpoint of each."""
