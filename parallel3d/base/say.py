"""The type of what prints a line for the user, on the one rank that speaks."""

from collections.abc import Callable

Say = Callable[[str], None]
"""Prints a line of text; on all ranks but one it does nothing."""
