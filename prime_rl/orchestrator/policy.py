"""The policy versions of one run that inference serves: which is current, which are in use, what is restored.

Version 0 is the base model. A `Publication` brings a version to the servers and finds which version an answer comes
from: `adapters`, or `whole_weights` where the run trains the whole model. The scheduler decides when to switch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from prime_rl.contract.layout import parse_adapter_name
from prime_rl.orchestrator.client import RequestRefused, ServedModel

logger = logging.getLogger(__name__)

# What a run leaves on the servers is taken back within this when the orchestrator ends; well below the supervisor's
# grace.
CLOSE_TIMEOUT_S = 5.0
# A current version that is refused may be had a moment later, or a newer one is: for so long requests wait for that.
RESTORE_LIMIT_S = 120.0
RESTORE_RETRY_S = 1.0


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


class Publication(Protocol):
    """How the versions of one run get to the servers."""

    async def begin(self) -> None:
        """Take away what an earlier orchestrator of the run left; afterwards version 0 is served."""

    async def publish(self, version: int) -> None:
        """Have every living server serve `version`, and each that comes back. Raises RequestRefused."""

    async def restore(self, version: int) -> None:
        """Give `version` again to the servers that have lost it. Raises RequestRefused."""

    def retain(self, is_needed: Callable[[int], bool]) -> None:
        """Let go of the versions that are not needed."""

    async def withdraw(self) -> None:
        """Leave the servers as they were before the run."""

    def unchanged(self) -> AbstractAsyncContextManager[object]:
        """Inside, the current version is not replaced, where a new one would take its place."""

    def model_name(self, version: int) -> str:
        """What a request for `version` names."""

    def label(self, version: int) -> str:
        """What people and logs call `version`."""

    def answered_by(self, asked: int, weights: str | None, *, exactly: bool) -> int:
        """The version behind an answer to a request for `asked`: that one, or unless `exactly` a newer one.

        `weights` is from the server's answer. Raises UnknownModel when it is neither: the server has lost it.
        """


class PolicyVersions:
    """What inference serves of this run. `version` is what new requests use."""

    def __init__(self, publication: Publication) -> None:
        self._publication = publication
        self.version = 0
        self._users: Counter[int] = Counter()
        self._switched = asyncio.Condition()
        self._refusal = ""

    async def begin(self) -> None:
        """Before the first request: what an earlier orchestrator of this run left (it was killed) goes."""
        await self._publication.begin()

    async def switch_to(self, version: int) -> None:
        """Have `version` served and use it for all new requests. Requests under way go on. Raises RequestRefused."""
        async with self._publication.unchanged():
            await self._publication.publish(version)
            before, self.version = self.version, version
        logger.info("policy version %d (before: %d)", version, before)
        self._sweep()
        async with self._switched:
            self._switched.notify_all()

    @contextlib.asynccontextmanager
    async def pin(self, at_least: int) -> AsyncIterator[int]:
        """Wait until new requests use `at_least` or a newer version, and have that one until the end of the block."""
        async with self._switched:
            await self._switched.wait_for(lambda: self.version >= at_least)
        async with self._publication.unchanged():
            with self.use() as (version, _):
                yield version

    @contextlib.contextmanager
    def use(self, version: int | None = None) -> Iterator[tuple[int, str]]:
        """Keep a version (default: the current one) for as long as the block runs: (version, model name)."""
        held = self.version if version is None else version
        self._users[held] += 1
        try:
            yield held, self._publication.model_name(held)
        finally:
            self._users[held] -= 1
            self._sweep()

    def answered_by(self, asked: int, weights: str | None, *, exactly: bool) -> int:
        """The version that an answer comes from; see `Publication.answered_by`."""
        return self._publication.answered_by(asked, weights, exactly=exactly)

    async def restore(self, version: int | None = None) -> None:
        """Give a version (default: the current one) to the servers that have lost it.

        Raises InferenceError when that is not available, for example because its broadcast folder is gone. The current
        one is tried for a while: a switch to a newer one fixes it too.
        """
        if version is not None:
            await self._publication.restore(version)
            return
        give_up_s = asyncio.get_running_loop().time() + RESTORE_LIMIT_S
        while True:
            try:
                await self._publication.restore(self.version)
                return
            except RequestRefused as error:
                if asyncio.get_running_loop().time() > give_up_s:
                    raise
                logger.log(self._level_of(str(error)), "%s is lost for now: %s", self.label(self.version), error)
            await asyncio.sleep(RESTORE_RETRY_S)

    async def close(self) -> None:
        """Leave the servers as they were before the run, as far as they answer in time."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._publication.withdraw()
        except TimeoutError:
            logger.warning("inference did not unload %s in time", self.label(self.version))

    def label(self, version: int) -> str:
        """What people and logs call `version`."""
        return self._publication.label(version)

    def _level_of(self, refusal: str) -> int:
        """Warn once: many requests get the same refusal."""
        known, self._refusal = self._refusal == refusal, refusal
        return logging.DEBUG if known else logging.WARNING

    def _sweep(self) -> None:
        """Let go of what is older than the current version and not in use."""
        self._publication.retain(lambda version: version >= self.version or self._users[version] > 0)
