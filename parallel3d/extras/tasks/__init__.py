"""Scores on tasks of the library lm_eval, by the forwards of a run's mesh."""
