"""Measures a machine, and writes what the planner knows of it (floor 5)."""
