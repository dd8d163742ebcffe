"""A run's connection to inference: its servers, its base model there, and how its policy versions get there.

They do as adapters, or, where the trainer has none, as whole weights. This is the one place that distinguishes the two:
the run's config may choose, else the trainer decides, in its status file. Everything else works with a `Publication`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Protocol

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.served import parse_adapter_name
from prime_rl.orchestrator.adapters import AdapterPublication
from prime_rl.orchestrator.client import Endpoint, ServedModel, ServerClient
from prime_rl.orchestrator.guard import RunFailed
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.orchestrator.replicas import Replicas
from prime_rl.orchestrator.trainer_watch import trainer_status
from prime_rl.orchestrator.whole_weights import WholeWeights, lease
from prime_rl.utils.secrets import SecretError, read_secret

logger = logging.getLogger(__name__)

# Below the supervisor's grace.
CLEAR_TIMEOUT_S = 5.0


class Publication(Protocol):
    """How the versions of one run get to the servers; `client` has these, and calls `equip` for one that comes back.

    Attributes:
        first: the version that is served before any is published: 0, the base model, or -1 where that is not a
            version of the run, because it starts from an adapter.
    """

    first: int

    async def equip(self, server: ServerClient) -> None:
        """Give a server that comes back what the others have."""

    async def begin(self, client: InferenceClient) -> None:
        """Remove what an earlier orchestrator of the run left; afterwards `first` is served."""

    async def publish(self, client: InferenceClient, version: int) -> None:
        """Have every living server serve `version`, and each that comes back. Raises RequestRefused."""

    async def restore(self, client: InferenceClient, version: int) -> None:
        """Give `version` again to the servers that have lost it. Raises RequestRefused."""

    def retain(self, client: InferenceClient, is_needed: Callable[[int], bool]) -> None:
        """Let go of the versions that are not needed."""

    async def withdraw(self, client: InferenceClient) -> None:
        """Leave the servers as they were before the run."""

    def unchanged(self) -> AbstractAsyncContextManager[object]:
        """Inside, the current version is not replaced, where a new one would take its place."""

    def model_name(self, version: int) -> str | None:
        """What a request for `version` names; None for the name of the base model."""

    def label(self, version: int) -> str:
        """What people and logs call `version`."""

    def answered_by(self, asked: int, weights: str | None, *, exactly: bool) -> int:
        """The version behind an answer to a request for `asked`: that one, or unless `exactly` a newer one.

        `weights` is from the server's answer. Raises UnknownModel when it is neither: the server has lost it.
        """


async def choose_publication(
    config: OrchestratorConfig, run: RunDir, say: Callable[[str | None], None], cleanup: AsyncExitStack
) -> Publication:
    """Adapters or whole weights. `say` gets what is waited for; `cleanup` gives the servers' weights back."""
    whole = config.model.trains_whole_model
    if whole is None:
        whole = (await trainer_status(run, say, "whether it trains adapters")).max_rank is None
    if not whole:
        return AdapterPublication(run, from_adapter=config.init.from_ is not None)
    await cleanup.enter_async_context(lease(OutputDir(run.path.parent).weights_lock, say))
    return WholeWeights(run)


def connect(
    config: OrchestratorConfig,
    run: RunDir,
    publication: Publication,
    on_trouble: Callable[[str | None], None] = lambda trouble: None,
) -> InferenceClient:
    """The run's servers, which get what is published; `on_trouble` as for InferenceClient. Raises RunFailed."""
    try:
        api_key = read_secret(config.client.api_key_var, os.environ)
    except SecretError as error:
        raise RunFailed(str(error)) from error
    client = InferenceClient(
        [Endpoint(run.path.parent, url) for url in config.client.urls],
        publication.equip,
        on_trouble=on_trouble,
        api_key=api_key,
        run_id=run.run_id,
        timeout_s=config.client.timeout_s,
        max_concurrent_requests=config.client.max_concurrent_requests,
    )
    if config.client.base_url is None:
        client.follow(Replicas(run.path.parent))
    return client


async def clear_inference(config: OrchestratorConfig, run: RunDir) -> None:
    """Unload the run's adapters, as far as inference answers in time: an orchestrator that was killed left them."""
    publication = AdapterPublication(run)
    client = connect(config, run, publication)
    try:
        async with asyncio.timeout(CLEAR_TIMEOUT_S):
            await publication.begin(client)
    except TimeoutError:
        logger.warning("inference does not answer: it has no adapters of %s, or keeps them", run.run_id)
    finally:
        await client.close()


async def base_model(client: InferenceClient, wanted: str) -> str:
    """The name under which inference serves the run's base model; waits until inference answers."""
    served = await client.list_models()
    name = find_base_model(wanted, served)
    if name is None:
        raise RunFailed(f"inference serves {[model.id for model in served]}, but this run trains {wanted!r}")
    return name


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
