"""Seconds of a step: operators, collectives, transfers, and the schedule's own list."""
