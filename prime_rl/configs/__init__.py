"""Configuration of every process: frozen pydantic models, checked at load. Layer 1: never torch, never vLLM."""
