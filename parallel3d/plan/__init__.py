"""Predict a run's memory and speed, and search for its best mesh, before launch."""
