"""Export weights to, and import them from, folders that Hugging Face transformers loads."""
