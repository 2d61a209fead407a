"""Checkpoints: a run's training state on disk, written by any mesh and read by any other."""
