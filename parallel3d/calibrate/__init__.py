"""Measurement of a machine, written as the hardware file that the planner reads."""
