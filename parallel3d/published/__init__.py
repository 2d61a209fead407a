"""Published runs of other programs, and how far off the planner is on them (floor 0, no torch)."""
