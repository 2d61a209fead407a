"""The device mesh: the only part of the library that knows ranks (floor 1)."""
