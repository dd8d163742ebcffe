"""Publication of a run that trains the whole model: a server has one version at a time, and its answers name it.

A request goes to the base model's name and is answered by the weights that are in force when its turn comes, so its
version is known from the answer alone. It may be newer than the one that was asked; older, or of another run, it is not
taken: that server was restarted, or another client has changed its weights. While `lease` is held no other process of
this workspace does that.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from prime_rl.contract.files import make_folder, open_lock
from prime_rl.contract.layout import RunDir
from prime_rl.contract.served import parse_weights_name, weights_name
from prime_rl.orchestrator.client import InferenceError, RequestRefused, ServerClient, UnknownModel
from prime_rl.orchestrator.pool import InferenceClient

logger = logging.getLogger(__name__)

LEASE_POLL_S = 0.3


@contextlib.asynccontextmanager
async def lease(path: Path, tell: Callable[[str | None], None]) -> AsyncIterator[None]:
    """Take the weights of the workspace's servers for this process; waits while another run has them."""
    make_folder(path.parent)
    with os.fdopen(open_lock(path), "r+b") as file:  # the kernel gives the lock back however this process ends
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                tell("another run to give back the weights of inference: one at a time trains the whole model")
                await asyncio.sleep(LEASE_POLL_S)
        tell(None)
        yield


class WholeWeights:
    """See the module."""

    def __init__(self, run: RunDir) -> None:
        self.first = 0
        self._run = run
        self._wanted = 0  # what every living server has, or is being given
        self._giving = asyncio.Lock()
        self._pinned = asyncio.Lock()

    async def equip(self, server: ServerClient) -> None:
        """Load the wanted version on a server that comes back, whatever it reports; a refusal is logged."""
        try:
            await self._give(server, anyway=True)  # whatever it had, it may have lost
        except RequestRefused as error:  # its answers will not be taken, and the next version is given to it again
            logger.warning("a restarted server refuses %s: %s", self.label(self._wanted), error)

    async def begin(self, client: InferenceClient) -> None:
        """Back to the base model: a version of an earlier life may have been rolled back and made again since."""
        await self.publish(client, 0)

    async def publish(self, client: InferenceClient, version: int) -> None:
        """Load `version` on every living server, and on each that comes back. Raises RequestRefused."""
        async with self._giving:
            before, self._wanted = self._wanted, version
            try:
                await client.everywhere(self._give)
            except BaseException:
                self._wanted = before
                raise

    async def restore(self, client: InferenceClient, version: int) -> None:
        """Load the current version, which is `version` or newer, on servers that have lost it."""
        async with self._giving:
            await client.everywhere(self._give)

    def retain(self, client: InferenceClient, is_needed: Callable[[int], bool]) -> None:
        """The one version that a server has goes when the next one comes."""

    async def withdraw(self, client: InferenceClient) -> None:
        """Give all living servers the base model back, in one attempt; a failure is logged."""
        self._wanted = 0
        for error in await client.once_everywhere(self._give):
            if isinstance(error, InferenceError):
                logger.warning("a server keeps the weights of %s: %s", self._run.run_id, error)

    def unchanged(self) -> contextlib.AbstractAsyncContextManager[object]:
        """A lock: a switch of the version and a block that must keep it wait for each other."""
        return self._pinned

    def model_name(self, version: int) -> None:
        """None: every request names the base model, which stands for whatever weights a server has."""

    def label(self, version: int) -> str:
        """What a server reports when it has `version`; 0 is the base model."""
        return weights_name(self._run.run_id, version)

    def answered_by(self, asked: int, weights: str | None, *, exactly: bool) -> int:
        """The version in the answer's `weights`; newer than `asked` is accepted unless `exactly`.

        Raises UnknownModel for an older one, and for weights that are not of this run.
        """
        version = parse_weights_name(self._run.run_id, weights or "")
        if version is None or version < asked or (exactly and version > asked):
            raise UnknownModel(f"inference answered with the weights {weights!r} instead of {self.label(asked)!r}")
        return version

    async def _give(self, server: ServerClient, *, anyway: bool = False) -> None:
        """Load the wanted version on a server that does not report it, or `anyway`. Raises RequestRefused."""
        # Again after every answer: the version may have changed meanwhile.
        while anyway or server.weights != self.label(self._wanted):
            anyway, label = False, self.label(self._wanted)
            await server.load_weights(self._run.broadcast_dir(self._wanted).resolve() if self._wanted else None)
            if label == self.label(self._wanted) and server.weights != label:
                raise RequestRefused(f"inference reports the weights {server.weights!r} instead of {label!r}")
