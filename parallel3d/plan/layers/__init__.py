"""Placement of layers on ranks, their kinds, and their numbers of elements."""
