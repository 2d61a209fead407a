"""What a run leaves on disk of its model."""
