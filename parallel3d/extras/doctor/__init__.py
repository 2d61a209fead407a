"""Checks of the machines of a launch before a run."""
