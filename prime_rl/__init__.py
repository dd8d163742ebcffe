"""Multi-tenant reinforcement learning: one trainer, many runs, one terminal."""

__version__ = "0.2.0"
