"""Many LoRA adapters over one frozen model. Layer 1: torch and safetensors only; shared by trainer and inference."""
