"""The trainer: one frozen base model, one LoRA slot a run. Layer 2; `train.py` is the entry and reads top to bottom."""
