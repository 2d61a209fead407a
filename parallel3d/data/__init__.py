"""The path from text to samples: sources, tokenizer, corpus, order, batches (rank-agnostic)."""
