"""The policy versions of one run that inference holds: load, switch, load again, unload.

Version 0 is the base model. Every later version is an adapter of its own name, so a request is answered by the version
it asked for or not at all. A version stays loaded while a request of ours uses it, and goes when it is neither current
nor in use. When to switch is decided by the scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from prime_rl.contract.layout import RunDir, adapter_name, parse_adapter_name
from prime_rl.orchestrator.client import InferenceError, ServedModel, UnknownModel
from prime_rl.orchestrator.pool import InferenceClient

logger = logging.getLogger(__name__)

# All adapters of a run are unloaded within this when the orchestrator ends; well below the supervisor's grace.
CLOSE_TIMEOUT_S = 5.0


def find_base_model(wanted: str, served: Sequence[ServedModel]) -> str | None:
    """The name under which inference serves the base model `wanted` (its name, or the same folder), or None."""
    names = [model.id for model in served if parse_adapter_name(model.id) is None]
    if wanted in names:
        return wanted
    folder = Path(wanted)
    for model in served:
        if model.id in names and folder.exists() and Path(model.root or model.id).resolve() == folder.resolve():
            return model.id
    return None


class PolicyVersions:
    """What inference serves of this run. `version` is what new requests use.

    Args:
        base_model: the name under which inference serves version 0.
    """

    def __init__(self, client: InferenceClient, run: RunDir, base_model: str) -> None:
        self._client = client
        self._run = run
        self._base_model = base_model
        self.version = 0
        self._loaded: set[int] = set()  # adapters that may be loaded, also while a load is under way
        self._unloading: set[int] = set()
        self._users: Counter[int] = Counter()
        self._restoring = asyncio.Lock()
        self._switched = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def forget_leftovers(self) -> None:
        """Unload what an earlier orchestrator of this run left behind (it was killed)."""
        for model in await self._client.list_models():
            parsed = parse_adapter_name(model.id)
            if parsed and parsed[0] == self._run.run_id:
                await self._unload(parsed[1])

    async def switch_to(self, version: int) -> None:
        """Load `version` and use it for all new requests. Requests under way go on. Raises RequestRefused."""
        await self._load(version)
        before, self.version = self.version, version
        logger.info("policy version %d (before: %d)", version, before)
        self._sweep()
        async with self._switched:
            self._switched.notify_all()

    async def reach(self, version: int) -> int:
        """Wait until new requests use `version` or a newer one; returns which."""
        async with self._switched:
            await self._switched.wait_for(lambda: self.version >= version)
        return self.version

    @contextlib.contextmanager
    def use(self, version: int | None = None) -> Iterator[tuple[int, str]]:
        """Keep a version (default: the current one) loaded for as long as the block runs: (version, model name)."""
        held = self.version if version is None else version
        self._users[held] += 1
        try:
            yield held, self.model_name(held)
        finally:
            self._users[held] -= 1
            self._sweep()

    async def restore(self, version: int | None = None) -> None:
        """Load a version (default: the current one) that inference has lost; several callers cause one load.

        Raises InferenceError when it cannot be loaded, for example because its broadcast folder is gone.
        """
        async with self._restoring:
            lost = self.version if version is None else version
            if lost and not await self._client.serves(self.model_name(lost)):
                logger.warning("inference has lost %s: loading it again", self.model_name(lost))
                await self._load(lost)

    async def close(self) -> None:
        """Unload all of this run's adapters, as far as inference answers in time."""
        for task in self._tasks:
            task.cancel()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for version in sorted(self._loaded):
                    await self._unload(version)
        except TimeoutError:
            logger.warning("inference did not take back the adapters of %s in time", self._run.run_id)

    def model_name(self, version: int) -> str:
        return adapter_name(self._run.run_id, version) if version else self._base_model

    async def _load(self, version: int) -> None:
        self._loaded.add(version)
        await self._client.load_adapter(self.model_name(version), self._run.broadcast_dir(version).resolve())

    def _sweep(self) -> None:
        """Unload what is older than the current version and not in use."""
        for version in list(self._loaded - self._unloading):
            if version < self.version and not self._users[version]:
                self._unloading.add(version)
                task = asyncio.get_running_loop().create_task(self._unload(version))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _unload(self, version: int) -> None:
        try:
            await self._client.unload_adapter(self.model_name(version))
        except UnknownModel:
            pass
        except InferenceError as error:
            logger.warning("%s stays loaded for now: %s", self.model_name(version), error)
            return
        finally:
            self._unloading.discard(version)
        self._loaded.discard(version)
