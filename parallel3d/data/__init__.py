"""From text to samples: sources, tokenizer, corpus, order, batches (floor 2; knows no rank)."""
