"""A run's connection to inference: its servers, its base model there, and how its policy versions get there.

They do as adapters, or, where the trainer has none, as whole weights. This is the one place that distinguishes the two:
the run's config may choose, else the trainer decides, in its status file. Everything else works with a `Publication`.
Of an adapter every version is on the servers under its own name, so nothing has to end when a new one comes: a request
is answered by the version it names or not at all. `retain` unloads versions that are no longer needed.

Also: what a run's sampling and the log-probabilities of inference mean for the importance ratio, before any training.
The trainer's own log-probabilities have the run's temperature and no other setting (docs/inference.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

from prime_rl.configs.base import SamplingConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.files import make_folder, open_lock
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.served import (
    TEACHER_PREFIX,
    adapter_name,
    is_teacher,
    parse_adapter_name,
    parse_weights_name,
    weights_name,
)
from prime_rl.orchestrator.client import (
    AdapterRefused,
    Endpoint,
    InferenceError,
    RequestRefused,
    ServedModel,
    ServerClient,
    UnknownModel,
)
from prime_rl.orchestrator.guard import RunFailed, trainer_status
from prime_rl.orchestrator.pool import InferenceClient, Replicas
from prime_rl.utils.runtime import Background
from prime_rl.utils.secrets import SecretError, read_secret


class AdapterPublication:
    """Publication of a run with an adapter. `from_adapter`: version 0 is published too; else it is the base model.

    Attributes:
        first: the version that is served before any is published: 0, the base model, or -1 where that is not a
            version of the run, because it starts from an adapter.
    """

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
                try:
                    await self._load(server, missing[0])
                except (RequestRefused, AdapterRefused) as error:
                    # Raised to callers that ask for this one; the others must not wait for it.
                    logger.warning("a restarted server refuses %s: %s", self.label(missing[0]), error)
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
        name, folder = self._name(version), self._run.broadcast_dir(version).resolve()
        try:
            await server.load_adapter(name, folder)
        except RequestRefused:
            # Versions of this run that somebody else has loaded take its room.
            if not (foreign := self._own(await server.list_models()) - self._loaded):
                raise
            for each in sorted(foreign):
                await server.unload_adapter(self._name(each))
            await server.load_adapter(name, folder)

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


class Unserved(AdapterPublication):
    """Publication of a run that samples nothing: no server gets its versions."""

    async def begin(self, client: InferenceClient) -> None:
        """There is none."""

    async def publish(self, client: InferenceClient, version: int) -> None:
        """There is none."""


logger = logging.getLogger(__name__)

# Below the supervisor's grace.
CLEAR_TIMEOUT_S = 5.0
LEASE_POLL_S = 0.3


@asynccontextmanager
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
    """Publication of a run that trains the whole model: a server has one version at a time, and its answers name it.

    A request goes to the base model's name and is answered by the weights that are in force when its turn comes, so its
    version is known from the answer alone. It may be newer than the one that was asked; older, or of another run, it is
    not taken: that server was restarted, or another client has changed its weights. While `lease` is held no other
    process of this workspace does that.
    """

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
        except (RequestRefused, AdapterRefused) as error:
            # Its answers will not be taken, and the next version is given to it again.
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

    def unchanged(self) -> AbstractAsyncContextManager[object]:
        """A lock: a switch of the version and a block that must keep it wait for each other."""
        return self._pinned

    def model_name(self, version: int) -> None:
        """None: every request names the base model, which stands for whatever weights a server has."""

    def label(self, version: int) -> str:
        """The name that a server reports when it has `version`; 0 is the base model."""
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


# The way of one run's versions to the servers; `client` has these, and calls `equip` for one that comes back.
Publication = AdapterPublication | WholeWeights


async def choose_publication(
    config: OrchestratorConfig, run: RunDir, say: Callable[[str | None], None], cleanup: AsyncExitStack
) -> Publication:
    """Adapters or whole weights. `say` gets what is waited for; `cleanup` gives the servers' weights back."""
    if not config.needs_inference:
        return Unserved(run)
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
        [Endpoint(run.path.parent, url) for url in config.client.urls if config.needs_inference],
        publication.equip,
        on_trouble=on_trouble,
        api_key=api_key,
        run_id=run.run_id,
        timeout_s=config.client.timeout_s,
        max_concurrent_requests=config.client.max_concurrent_requests,
    )
    if config.client.base_url is None and config.needs_inference:
        client.follow(Replicas(run.path.parent))
    return client


async def clear_inference(config: OrchestratorConfig, run: RunDir) -> None:
    """Unload the run's adapters, as far as inference answers in time: an orchestrator that was killed left them."""
    if not config.needs_inference:
        return
    publication = AdapterPublication(run)
    client = connect(config, run, publication)
    try:
        async with asyncio.timeout(CLEAR_TIMEOUT_S):
            await publication.begin(client)
            await unload_teachers(client, run)
    except TimeoutError:
        logger.warning("inference does not answer: it has no adapters of %s, or keeps them", run.run_id)
    finally:
        await client.close()


async def unload_teachers(
    client: InferenceClient, run: RunDir, is_left: Callable[[int], bool] = lambda number: True
) -> None:
    """Unload what an earlier orchestrator of this run had as teachers (it was killed), if their number `is_left`."""
    for name in (model.id for model in await client.list_models() if is_teacher(model.id)):
        found = parse_adapter_name(name.removeprefix(TEACHER_PREFIX))
        if found is not None and found[0] == run.run_id and is_left(found[1]):
            await client.once_everywhere(lambda server, name=name: server.unload_adapter(name))  # type: ignore[misc]


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


def check_temperature(sampling: SamplingConfig, *, raw: bool) -> None:
    """Raises RunFailed when inference has `raw` log-probabilities, which have no temperature, and the run has one."""
    if raw and sampling.temperature != 1.0:
        raise RunFailed(
            f"sampling.temperature: found {sampling.temperature:g}: must be 1 with this inference server, whose "
            'logprobs_mode is "raw_logprobs": its log-probabilities have no temperature, those of the trainer have; '
            'or set inference.logprobs_mode = "processed_logprobs" and restart inference'
        )


def warn_of_narrow_sampling(sampling: SamplingConfig, *, raw: bool) -> None:
    """One warning with the settings because of which answers are not sampled from the policy itself."""
    if not sampling.narrows:
        return
    consequence = (
        'and with logprobs_mode = "raw_logprobs" importance ratios begin at 1 and do not correct for that: updates are '
        "biased"
        if raw
        else "so importance ratios begin away from 1"
    )
    names = ", sampling.".join(sampling.narrows)
    logging.getLogger("orchestrator").warning(
        "sampling.%s: answers are not sampled from the policy itself, %s", names, consequence
    )
