"""Weights as folders that Hugging Face's transformers loads, and the proof that it does."""
