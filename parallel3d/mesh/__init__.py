"""The device mesh: the only place that knows ranks (floor 1)."""
