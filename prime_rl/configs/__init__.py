"""Configuration of every process: frozen pydantic models, checked at load. Layer 1: never torch, never vLLM."""

from importlib import resources
from pathlib import Path

# The example configs: `configs/` of a checkout, to which `examples` is a link; in an installed package a folder of it.
EXAMPLES = Path(str(resources.files(__name__) / "examples")).resolve()
