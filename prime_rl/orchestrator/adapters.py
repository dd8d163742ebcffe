"""Publication of a run that trains an adapter: every version is on the servers under its own name.

Several versions are loaded side by side, so nothing has to end when a new one comes: a request is answered by the
version it names or not at all. `retain` unloads versions that are no longer needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

from prime_rl.contract.layout import RunDir
from prime_rl.contract.served import adapter_name, parse_adapter_name
from prime_rl.orchestrator.client import (
    AdapterRefused,
    InferenceError,
    RequestRefused,
    ServedModel,
    ServerClient,
    UnknownModel,
)
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.utils.background import Background

logger = logging.getLogger(__name__)


class AdapterPublication:
    """See the module. `from_adapter`: version 0 is published too; else it is the base model."""

    def __init__(self, run: RunDir, *, from_adapter: bool = False) -> None:
        self.first = -1 if from_adapter else 0
        self._run = run
        self._wanted: set[int] = set()  # what every living server has, or is being given
        self._loaded: set[int] = set()  # what some server may have, also while a load is under way
        self._unloading: set[int] = set()
        self._restoring = asyncio.Lock()
        self._tasks = Background()

    async def equip(self, server: ServerClient) -> None:
        """Give the server every adapter of the run, and unload those of this run that are no longer in use.

        They were unloaded while it was away, or an earlier orchestrator left them.
        """
        has = self._own(await server.list_models())
        tried: set[int] = set()
        # Again after every answer: the run may have loaded or unloaded another meanwhile.
        while True:
            if stale := sorted(has - self._wanted):
                has.discard(stale[0])
                await server.unload_adapter(self._name(stale[0]))
            elif missing := sorted(self._wanted - has - tried):
                tried.add(missing[0])
                await self._equip_one(server, missing[0])
                has.add(missing[0])
            else:
                break

    async def begin(self, client: InferenceClient) -> None:
        """Unload what an earlier orchestrator of this run left behind (it was killed)."""
        for version in sorted(self._own(await client.list_models())):
            await self._unload(client, version)

    async def publish(self, client: InferenceClient, version: int) -> None:
        """Load `version` on every living server, and on each that comes back. Raises RequestRefused."""
        self._loaded.add(version)
        self._wanted.add(version)
        try:
            await client.everywhere(lambda server: self._load(server, version))
        except BaseException:
            self._wanted.discard(version)
            raise

    async def restore(self, client: InferenceClient, version: int) -> None:
        """Load `version` on all servers again where one has lost it. Raises RequestRefused."""
        async with self._restoring:  # several callers cause one load
            if version <= self.first:
                return
            found = await client.everywhere(lambda server: server.list_models())
            if not all(version in self._own(models) for models in found):
                logger.warning("inference has lost %s: loading it again", self.label(version))
                await self.publish(client, version)

    def retain(self, client: InferenceClient, is_needed: Callable[[int], bool]) -> None:
        """Unload the versions that are not needed, in the background."""
        for version in list(self._loaded - self._unloading):
            if not is_needed(version):
                self._unloading.add(version)
                self._tasks.start(self._unload(client, version), f"unloading {self.label(version)}")

    async def withdraw(self, client: InferenceClient) -> None:
        """Unload all versions that a server may have, one after the other."""
        await self._tasks.cancel()
        for version in sorted(self._loaded):
            await self._unload(client, version)

    def unchanged(self) -> contextlib.AbstractAsyncContextManager[object]:
        """A block that holds nothing: a version stays loaded when the next one comes."""
        return contextlib.nullcontext()

    def model_name(self, version: int) -> str | None:
        """The adapter's name; None for `first`, which the base model serves."""
        return self._name(version) if version > self.first else None

    def label(self, version: int) -> str:
        """The adapter's name, or "the base model" for `first`."""
        return self._name(version) if version > self.first else "the base model"

    def answered_by(self, asked: int, weights: str | None, *, exactly: bool) -> int:
        """The version that was asked, always: its name means one version only."""
        return asked  # a server has the adapter of that name, or it answers 404

    def _name(self, version: int) -> str:
        return adapter_name(self._run.run_id, version)

    def _own(self, models: Iterable[ServedModel]) -> set[int]:
        """The versions of this run among `models`."""
        parsed = [parse_adapter_name(model.id) for model in models]
        return {name[1] for name in parsed if name is not None and name[0] == self._run.run_id}

    async def _load(self, server: ServerClient, version: int) -> None:
        await server.load_adapter(self._name(version), self._run.broadcast_dir(version).resolve())

    async def _equip_one(self, server: ServerClient, version: int) -> None:
        try:
            await self._load(server, version)
        except (RequestRefused, AdapterRefused) as error:
            # Raised to callers that ask for this one; the others must not wait for it.
            logger.warning("a restarted server refuses %s: %s", self.label(version), error)

    async def _unload(self, client: InferenceClient, version: int) -> None:
        """Unload `version` everywhere, in one attempt: what stays behind is found and unloaded at the next start."""
        self._wanted.discard(version)
        try:
            results = await client.once_everywhere(lambda server: server.unload_adapter(self._name(version)))
        finally:
            self._unloading.discard(version)
        errors = [result for result in results if result is not None and not isinstance(result, UnknownModel)]
        if not errors:
            self._loaded.discard(version)
        elif isinstance(errors[0], InferenceError):
            logger.warning("%s stays loaded for now: %s", self.label(version), errors[0])
        else:
            raise errors[0]
