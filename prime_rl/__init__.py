"""Multi-tenant reinforcement learning: one trainer, many runs, one terminal."""

from prime_rl.utils.secrets import seal_if_handed

seal_if_handed()

__version__ = "0.2.0"
