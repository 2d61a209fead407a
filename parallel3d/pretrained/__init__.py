"""Weights of published models, from folders of transformers into this mesh (floor 5)."""
