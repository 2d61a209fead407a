"""Seconds of a step: operators, collectives, transfers, and the simulated schedule."""
