"""What surrounds a training run: its start, its folder, its steps, its end (floor 5)."""
