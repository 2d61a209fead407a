"""What a model family gives to the rest: its layers and their costs, as data (floor 0)."""
