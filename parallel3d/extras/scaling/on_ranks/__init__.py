"""Checks of scaling that start ranks."""
