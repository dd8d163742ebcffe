"""Publication of a run that trains an adapter: every version is on the servers under its own name.

Several versions are loaded side by side, so nothing has to end when a new one comes: a request is answered by the
version it names or not at all. `retain` unloads versions that are no longer needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from prime_rl.contract.layout import RunDir, adapter_name, parse_adapter_name
from prime_rl.orchestrator.client import InferenceError, RequestRefused, ServerClient, UnknownModel
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.utils.background import Background

logger = logging.getLogger(__name__)


class AdapterSet:
    """The adapters that every living server has; one that comes back gets them first."""

    def __init__(self, client: InferenceClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._folders: dict[str, Path] = {}
        client.equip = self._equip

    async def serves(self, name: str) -> bool:
        """Whether every living server has `name`."""
        found = await self._client.everywhere(lambda server: server.list_models())
        return all(any(model.id == name for model in models) for models in found)

    async def load(self, name: str, folder: Path) -> None:
        """Load the PEFT folder under `name` on every living server. Raises RequestRefused."""
        self._folders[name] = folder
        try:
            await self._client.everywhere(lambda server: server.load_adapter(name, folder))
        except BaseException:
            self._folders.pop(name, None)
            raise

    async def unload(self, name: str) -> None:
        """Unload `name` everywhere, in one attempt: what stays behind is found and unloaded at the next start.

        Raises UnknownModel when no server has it.
        """
        self._folders.pop(name, None)
        results = await self._client.once_everywhere(lambda server: server.unload_adapter(name))
        errors = [result for result in results if result is not None]
        worst = [error for error in errors if not isinstance(error, UnknownModel)]
        if worst or (errors and len(errors) == len(results)):
            raise (worst or errors)[0]

    async def _equip(self, server: ServerClient) -> None:
        """Give the server every adapter of the run, and unload those of this run that are no longer in use:
        they were unloaded while it was away, or an earlier orchestrator left them.
        """
        has = {model.id for model in await server.list_models()}
        tried: set[str] = set()
        # Again after every answer: the run may have loaded or unloaded another meanwhile.
        while True:
            if stale := sorted(name for name in has - self._folders.keys() if self._is_own(name)):
                has.discard(stale[0])
                await server.unload_adapter(stale[0])
            elif missing := sorted(self._folders.keys() - has - tried):
                tried.add(missing[0])
                await self._equip_one(server, missing[0])
                has.add(missing[0])
            else:
                break

    def _is_own(self, name: str) -> bool:
        parsed = parse_adapter_name(name)
        return parsed is not None and parsed[0] == self._run_id

    async def _equip_one(self, server: ServerClient, name: str) -> None:
        try:
            await server.load_adapter(name, self._folders[name])
        except RequestRefused as error:  # raised to callers that ask for this one; the others must not wait for it
            logger.warning("a restarted server refuses %s: %s", name, error)


class AdapterPublication:
    """See the module. `base_model` is the name under which inference serves version 0."""

    def __init__(self, client: InferenceClient, run: RunDir, base_model: str) -> None:
        self._client = client
        self._run = run
        self._base_model = base_model
        self._adapters = AdapterSet(client, run.run_id)
        self._loaded: set[int] = set()  # adapters that may be loaded, also while a load is under way
        self._unloading: set[int] = set()
        self._restoring = asyncio.Lock()
        self._tasks = Background()

    async def begin(self) -> None:
        """Unload what an earlier orchestrator of this run left behind (it was killed)."""
        for model in await self._client.list_models():
            parsed = parse_adapter_name(model.id)
            if parsed and parsed[0] == self._run.run_id:
                await self._unload(parsed[1])

    async def publish(self, version: int) -> None:
        self._loaded.add(version)
        await self._adapters.load(self.model_name(version), self._run.broadcast_dir(version).resolve())

    async def restore(self, version: int) -> None:
        async with self._restoring:  # several callers cause one load
            if version and not await self._adapters.serves(self.model_name(version)):
                logger.warning("inference has lost %s: loading it again", self.label(version))
                await self.publish(version)

    def retain(self, is_needed: Callable[[int], bool]) -> None:
        for version in list(self._loaded - self._unloading):
            if not is_needed(version):
                self._unloading.add(version)
                self._tasks.start(self._unload(version), f"unloading {self.label(version)}")

    async def withdraw(self) -> None:
        await self._tasks.cancel()
        for version in sorted(self._loaded):
            await self._unload(version)

    def unchanged(self) -> contextlib.AbstractAsyncContextManager[object]:
        return contextlib.nullcontext()

    def model_name(self, version: int) -> str:
        return adapter_name(self._run.run_id, version) if version else self._base_model

    def label(self, version: int) -> str:
        return self.model_name(version)

    def answered_by(self, asked: int, weights: str | None, *, exactly: bool) -> int:
        return asked  # a server has the adapter of that name, or it answers 404

    async def _unload(self, version: int) -> None:
        try:
            await self._adapters.unload(self.model_name(version))
        except UnknownModel:
            pass
        except InferenceError as error:
            logger.warning("%s stays loaded for now: %s", self.label(version), error)
            return
        finally:
            self._unloading.discard(version)
        self._loaded.discard(version)
