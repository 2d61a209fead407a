"""The layers of a model and their costs, as data (floor 0)."""
