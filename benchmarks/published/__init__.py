"""Published runs of other programs, and how far off the planner is on them (no torch)."""
