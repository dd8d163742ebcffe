"""What the front asks of the embedded engine: a token, the adapters it has, other weights between two steps.

The front has let every request end before weights change, and the engine keeps no keys and values of those that have
ended: nothing that was computed with other weights is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path

from torch import Tensor

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.engine import Engine
from prime_rl.inference.embedded.sampling import SamplingParams
from prime_rl.inference.embedded.weights import WholeWeights
from prime_rl.inference.weight_files import weights_label

PROBE_PROMPT = (0,)
_PROBE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class EmbeddedControl:
    """See the module."""

    def __init__(self, engine: Engine, weights: WholeWeights, config: InferenceConfig) -> None:
        self._engine = engine
        self._weights = weights
        self._output_dir = config.output_dir.resolve()
        self._broadcast = config.broadcast

    def adapters(self) -> Collection[str]:
        return self._engine.adapters.loaded().keys()

    def num_tokens(self) -> int:
        return self._engine.stats().num_generated_tokens

    async def verify_adapter(self, name: str) -> None:
        """Nothing to do: the store has put every tensor into the layer of that name itself, or refused the adapter."""

    async def generate_one(self) -> None:
        job = self._engine.submit(PROBE_PROMPT, _PROBE)
        try:
            await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            self._engine.cancel(job)
            raise

    async def load_weights(self, folder: Path) -> None:
        tensors = await asyncio.to_thread(self._read, folder)
        await self._between_steps(lambda: self._weights.apply(tensors))

    async def load_base(self) -> None:
        await self._between_steps(self._weights.apply_base)

    def _read(self, folder: Path) -> dict[str, Tensor]:
        """From the folder itself, or from the trainer that published it."""
        if self._broadcast.type == "filesystem":
            return self._weights.read(folder)
        return self._weights.fetch(self._broadcast, weights_label(self._output_dir, folder))

    async def _between_steps(self, action: Callable[[], None]) -> None:
        await asyncio.wrap_future(self._engine.run_between_steps(action))
