"""Checkpoints: the training state of a run on disk, written by any mesh and read by any other."""
