"""The inference server: one OpenAI-compatible HTTP interface, two engines. Layer 2."""
