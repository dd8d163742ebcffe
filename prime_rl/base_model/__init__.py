"""A base model from scratch: recipe, tokenizer, teaching, and how good it became."""
