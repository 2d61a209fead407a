"""Measure a machine and write the hardware file that the planner reads."""
