"""From text to samples: sources, tokenizer, corpus, order, batches (knows no rank)."""
