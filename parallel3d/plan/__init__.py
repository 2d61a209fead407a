"""Foresight: memory, speed and the best mesh of a run before it is launched (floor 0, no torch)."""
