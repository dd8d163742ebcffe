"""Our own engine: continuous batching over a Hugging Face causal LM with many LoRA adapters, for small models."""
