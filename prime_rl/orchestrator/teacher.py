"""Teachers: what another model says about each token that the policy sampled (`kind = "distill"`, docs/distill.md).

`Teachers` has one for each environment. A rollout is read as soon as it is made, its branches at the same time; what a
loss makes of it is decided in `batch`. A teacher is the base model or an adapter beside it, at the run's own inference,
or a model at another server. Adapters are copies in the run's folder, numbered: those that stand in the config by their
place there, made when the run was added; of a run that trains its newest version, made here (`Following`).

Legend: T = tokens of a whole branch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from prime_rl.configs.base import WatchConfig
from prime_rl.configs.distill import TeacherConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.files import UNDECODABLE, make_folder, read_text, remove, staged_dir
from prime_rl.contract.layout import LayoutError, OutputDir, RunDir, list_steps, stable_marker
from prime_rl.contract.peft import copy_adapter
from prime_rl.contract.served import MAX_TEACHER_ADAPTERS, teacher_name
from prime_rl.orchestrator.client import (
    AdapterRefused,
    InferenceError,
    RequestRefused,
    ScoredCompletions,
    ScoreRequest,
    Scores,
    UnknownModel,
    scores_of,
)
from prime_rl.orchestrator.envs.agent_judge import Awaited, Refused, Remote
from prime_rl.orchestrator.envs.checked import EnvironmentFault
from prime_rl.orchestrator.guard import MAX_LOOK_S, RunFailed
from prime_rl.orchestrator.policy import CLOSE_TIMEOUT_S, MAX_RESTORES, ChatTokenizer, TooLong
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.orchestrator.publication import unload_teachers
from prime_rl.orchestrator.recorder import Branch, Rollout, SoftTarget
from prime_rl.orchestrator.rollout import together
from prime_rl.orchestrator.scheduler import LOAD_REFUSED_LIMIT_S, LOAD_RETRY_S
from prime_rl.utils.text import one_line
from prime_rl.utils.watch import Watcher

logger = logging.getLogger(__name__)

# Of an answer: for each token that is told, and besides.
TOLD_BYTES, BESIDES_BYTES = 512, 1 << 20
# Of HTTP: a request that is wrong as it is. A server that is asked for more than it can read says so with these.
TOO_LONG = (400, 413, 422)
# Tokenizers that read this alike read all alike: spaces, numbers, code, accents, other scripts, an emoji.
SPOKEN = "Hello  world,\n\tit's 3.14159 x 1024!\nif (a[0] != b) { return 'é'; }  Ünïcödé 中文 русский العربية 🙂 ½"


class Teacher(Protocol):
    """Says how likely each token of a text is. `waits_for`: what it waits for itself."""

    waits_for: str | None

    async def score(self, token_ids: Sequence[int], top_k: int) -> Scores:
        """The log-probability of each token, and of the `top_k` likeliest there. Raises TooLong, or RunFailed."""


class LocalTeacher:
    """The model `name` of the run's inference, which has it always."""

    def __init__(self, client: InferenceClient, name: str) -> None:
        self.waits_for: str | None = None
        self._client = client
        self._name = name

    async def score(self, token_ids: Sequence[int], top_k: int) -> Scores:
        """What the model says."""
        try:
            async with self._client.places.hold(1):
                return await self._client.score(ScoreRequest(self._name, token_ids, top_k))
        except UnknownModel:
            raise
        except RequestRefused as error:
            raise TooLong(f"the teacher cannot read {len(token_ids)} tokens: {error}") from error


class AdapterTeacher(LocalTeacher):
    """The run's copy `number` of an adapter, beside the base model; what a restarted server has lost is loaded again.

    Raises RunFailed where that is a copy of another one than `source`.
    """

    def __init__(self, client: InferenceClient, run: RunDir, number: int, source: str) -> None:
        super().__init__(client, teacher_name(run.run_id, number))
        self._run = run
        self._source = source
        self._number = number
        self._users: Counter[int] = Counter()
        self._loading = asyncio.Lock()

    async def begin(self, say: Callable[[str | None], None]) -> None:
        """Load it, once there is room. Raises RunFailed, or AdapterRefused."""
        found = await asyncio.to_thread(read_text, self._run.teacher_source(self._number))
        if found != self._source:
            has = f"a copy of {found!r}" if found else "no copy of it"
            rule = "teachers are copied when a run is added: fork it with --set teacher=..., or add it again"
            raise RunFailed(f"teacher: found {self._source!r}, and the run has {has}: {rule}")
        await self._load_in_time(say)

    async def _load_in_time(self, say: Callable[[str | None], None]) -> None:
        """Load what is in use now, once there is room. Raises RunFailed, or AdapterRefused."""
        give_up_s = time.monotonic() + LOAD_REFUSED_LIMIT_S
        while True:
            try:
                await self._load(self._number)
                return
            except RequestRefused as error:
                what = f"inference to take the teacher {self._source} ({error})"
                if time.monotonic() > give_up_s:
                    raise RunFailed(f"timed out after {LOAD_REFUSED_LIMIT_S:g} s waiting for {what}") from error
                say(what)
            await asyncio.sleep(LOAD_RETRY_S)

    async def score(self, token_ids: Sequence[int], top_k: int) -> Scores:
        """What the adapter says that is in use now."""
        for attempt in itertools.count():
            number = self._number
            self._users[number] += 1
            try:
                return await LocalTeacher(self._client, teacher_name(self._run.run_id, number)).score(token_ids, top_k)
            except UnknownModel:
                if attempt == MAX_RESTORES:
                    raise
            finally:
                self._users[number] -= 1
            try:  # another run may have its room for now
                async with self._loading:
                    await self._load_in_time(partial(setattr, self, "waits_for"))
            finally:
                self.waits_for = None
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Unload it, as far as inference answers in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._unload(self._number)

    async def _unload(self, number: int) -> None:
        """Unload a copy everywhere, in one attempt: what stays behind is found at the next start."""
        name = teacher_name(self._run.run_id, number)
        await self._client.once_everywhere(lambda server: server.unload_adapter(name))

    async def _load(self, number: int) -> None:
        name, folder = teacher_name(self._run.run_id, number), self._run.teacher_dir(number).resolve()
        await self._client.everywhere(lambda server: server.load_adapter(name, folder))


class Following(AdapterTeacher):
    """The newest version of another run while that trains; its last one when that has ended, or is gone.

    Copies of `place` among the run's adapters have the numbers `place`, MAX_TEACHER_ADAPTERS + `place`, ..., one for
    each version. `is_alone`: there is room for the version before while the next one is loaded.
    """

    def __init__(
        self, client: InferenceClient, run: RunDir, place: int, source: str, followed: RunDir, *, is_alone: bool
    ) -> None:
        super().__init__(client, run, place, source)
        self._place = place
        self._followed = followed
        self._is_alone = is_alone
        self._seen: Version | None = None

    @property
    def version(self) -> int:
        """That of the run that it follows."""
        return self._number // MAX_TEACHER_ADAPTERS

    async def begin(self, say: Callable[[str | None], None]) -> None:
        """Have the newest version, once there is one, or the last copy."""
        while not await self._copy_newest():
            if not self._followed.path.is_dir():
                raise RunFailed(f"teacher: {self._followed.run_id} is gone, and has published no version")
            say(f"{self._who()} to publish its first version, for the teacher")
            await asyncio.sleep(MAX_LOOK_S)
        await super().begin(say)

    async def score(self, token_ids: Sequence[int], top_k: int) -> Scores:
        """What the version says that is in use; one whose weights are at fault is not asked again."""
        while True:
            seen = self._seen
            try:
                return await super().score(token_ids, top_k)
            except AdapterRefused as error:
                refused = error
            try:
                while self._seen == seen:
                    self.waits_for = f"{self._who()} to publish another version, for the teacher ({refused})"
                    await asyncio.sleep(MAX_LOOK_S)
            finally:
                self.waits_for = None

    async def follow(self, watch: WatchConfig) -> None:
        """Switch to each version that is newer, for as long as the run goes on."""
        watcher, told = Watcher([self._followed.broadcast], rescan_s=watch.rescan_s, kind=watch.kind), ""
        try:
            while True:
                await asyncio.to_thread(watcher.wait)
                await asyncio.to_thread(watcher.watch, [self._followed.broadcast])
                try:
                    await self.look()
                except (OSError, ValueError, InferenceError) as error:
                    level, told = logging.DEBUG if told == str(error) else logging.WARNING, str(error)
                    logger.log(level, "the teacher stays %s@v%d: %s", self._followed.run_id, self.version, error)
        finally:
            watcher.close()
            watcher.wake()  # a thread waits in it

    async def look(self) -> None:
        """Look once for another version, and switch to it. Raises OSError, ValueError, or InferenceError."""
        before, newest = self._number, await asyncio.to_thread(newest_version, self._followed)
        if newest is None or newest == self._seen:
            return
        try:
            number = await asyncio.to_thread(self._copy, newest)
            async with self._loading:
                # A server that was busy or away may have earlier ones still.
                await unload_teachers(self._client, self._run, lambda each: each != before and self._is_own(each))
                if not self._is_alone or number == before:  # a run that was set back has published it anew
                    await self._unload(before)
                try:
                    await self._load(number)
                except InferenceError:
                    if number != before:
                        await asyncio.to_thread(remove, self._run.teacher_dir(number))
                    raise
                self._number = number
        except (AdapterRefused, ValueError):
            self._seen = newest  # as it is it will not do
            raise
        self._seen = newest
        logger.info("the teacher is %s@v%d", self._followed.run_id, self.version)
        if number == before:
            return
        while self._users[before]:
            await asyncio.sleep(LOAD_RETRY_S)
        if self._is_alone:
            await self._unload(before)
        await asyncio.to_thread(remove, self._run.teacher_dir(before))

    async def _copy_newest(self) -> bool:
        """Take the newest version, else the newest copy; the other copies go. False: there is neither."""
        try:
            newest = await asyncio.to_thread(newest_version, self._followed)
            number = await asyncio.to_thread(self._copy, newest) if newest else None
            self._seen = newest
        except (OSError, ValueError) as error:
            logger.warning("the newest version of %s cannot be copied: %s", self._followed.run_id, error)
            number = None
        copies = list(filter(self._is_own, list_steps(self._run.teachers)))
        if number is None and not copies:
            return False
        self._number = copies[-1] if number is None else number
        for each in copies:
            if each != self._number:
                await asyncio.to_thread(remove, self._run.teacher_dir(each))
        return True

    def _who(self) -> str:
        """The run that it follows, and what keeps that from publishing."""
        run = self._followed
        marks = {"evicted": run.evicted, "invalid": run.config_error, "finished": run.finished, "paused": run.paused}
        state = next((word for word, path in marks.items() if os.path.lexists(path)), None)
        return f"{run.run_id} ({state})" if state else run.run_id

    def _is_own(self, number: int) -> bool:
        return number % MAX_TEACHER_ADAPTERS == self._place

    def _copy(self, version: Version) -> int:
        """The number of the copy. Raises OSError or ValueError, also when the version was removed meanwhile."""
        number, folder = version.number * MAX_TEACHER_ADAPTERS + self._place, version.folder
        make_folder(self._run.teachers)
        with staged_dir(self._run.teacher_dir(number)) as staged:
            copy_adapter(folder, staged)
            (staged / self._run.teacher_source(number).name).write_text(self._source, encoding="utf-8")
            # A version is removed marker first: what was copied while the marker stood is whole.
            if not any(stable_marker(each).exists() for each in (folder, folder.parent)):
                raise FileNotFoundError(f"{folder} was removed while it was copied")
        return number


class Version(NamedTuple):
    """A version of a run, a folder that has it, and when that was filled: one that was set back fills it again."""

    number: int
    folder: Path
    filled_ns: int


def newest_version(run: RunDir) -> Version | None:
    """The newest version of a run: published, else in a checkpoint. Raises OSError."""
    if published := list_steps(run.broadcast, stable_only=True):
        number, folder = published[-1], run.broadcast_dir(published[-1])
    elif saved := list_steps(run.checkpoints, stable_only=True):
        number, folder = saved[-1], run.trainer_checkpoint(saved[-1])
    else:
        return None
    return Version(number, folder, folder.stat().st_mtime_ns)


class OutsideTeacher(Awaited):
    """A model at another server, by vLLM's `prompt_logprobs`. Raises ConfigError for an address that cannot be used."""

    def __init__(self, config: TeacherConfig) -> None:
        self._model = config.model
        self._last_id = 0
        self._remote = Remote("the teacher", "teacher", config.base_url or "", "completions", config.api_key_var)
        self.close = self._remote.close

    async def begin(self, tokenizer: ChatTokenizer, top_k: int) -> None:
        """Raises RunFailed where its tokens are not those of the run."""
        own, spoken = tokenizer.encode(SPOKEN), ScoreRequest(self._model, SPOKEN.encode())
        self._last_id = tokenizer.last_id
        try:
            read = (await self._post({**spoken.body(), "prompt": SPOKEN}, spoken)).choices[0].prompt_logprobs
            await self.score([own[0], tokenizer.last_id], top_k)
        except (TooLong, EnvironmentFault) as error:
            raise RunFailed(str(error)) from error
        ids = [next(iter(each or {}), None) for each in read]
        if ids[1:] not in (own, own[1:]):  # its first token may be one that every text begins with
            words = "reads a text as other tokens than the run's model: a teacher must have the same tokenizer"
            raise RunFailed(f"{self._remote.who} {words}")

    async def score(self, token_ids: Sequence[int], top_k: int) -> Scores:
        """What the model says, which is waited for while it is busy or away."""
        request = ScoreRequest(self._model, token_ids, top_k)
        try:
            answer = await self._post(request.body(), request)
            found = await asyncio.to_thread(scores_of, answer, request, self._remote.url)
        except InferenceError as error:
            raise EnvironmentFault(f"the teacher is at fault: {error}") from error
        # Its vocabulary may be filled up further than that of the run's model.
        top_T = [[each for each in top if 0 <= each[0] <= self._last_id] for top in found.top_T]
        if not all(top_T[1:]):
            raise EnvironmentFault("the teacher is at fault: all that it holds likely is beyond the run's vocabulary")
        return replace(found, top_T=top_T)

    async def _post(self, body: Mapping[str, Any], request: ScoreRequest) -> ScoredCompletions:
        """Raises TooLong, EnvironmentFault for a part of an answer that is wrong, and RunFailed for all else."""
        limit = BESIDES_BYTES + TOLD_BYTES * (request.top_k + 2) * request.num_tokens
        try:
            answer = await self.answer(lambda: self._remote.post(body, limit))
            found = msgspec.json.decode(answer, type=ScoredCompletions)
            _ = found.choices[0]
            return found
        except (*UNDECODABLE, IndexError) as error:
            words = "gives no prompt_logprobs, as vLLM does"
            raise RunFailed(f"{self._remote.who} {words}: {one_line(str(error))}") from error
        except EnvironmentFault as error:
            if isinstance(error, Refused) and error.status in TOO_LONG:
                raise TooLong(f"the teacher cannot read it: {error}") from error
            raise RunFailed(str(error)) from error


class Teachers:
    """The teacher of each environment, by its name in metrics; `top_k`: tokens that are told of each place."""

    def __init__(self, by_env: Mapping[str, Teacher], top_k: int = 0) -> None:
        self.num_tokens = 0
        self._by_env = by_env
        self._top_k = top_k

    @property
    def waits_for(self) -> str | None:
        """A teacher that is waited for, or what that waits for."""
        return next(filter(None, (each.waits_for for each in self._by_env.values())), None)

    async def taught(self, env_name: str, rollout: Rollout) -> Rollout:
        """The rollout with what the environment's teacher says. Raises RolloutError, EnvironmentFault, or RunFailed."""
        branches = await together(self._read(self._by_env[env_name], branch) for branch in rollout.branches)
        return replace(rollout, branches=branches)

    async def _read(self, teacher: Teacher, branch: Branch) -> Branch:
        mask_T, found = branch.loss_mask_T, await teacher.score(branch.token_ids_T, self._top_k)
        self.num_tokens += len(mask_T)
        teacher_T = [value if is_learned else 0.0 for value, is_learned in zip(found.logprobs_T, mask_T, strict=True)]
        top_T = zip(found.top_T, mask_T, strict=bool(self._top_k))
        soft_T = [SoftTarget.of(top) if is_learned else None for top, is_learned in top_T]
        return replace(branch, teacher_T=teacher_T, soft_T=soft_T)

    async def follow(self, watch: WatchConfig) -> None:
        """Keep those new that are runs which train, for as long as the run goes on."""
        await together(each.follow(watch) for each in set(self._by_env.values()) if isinstance(each, Following))

    def figures(self) -> dict[str, float]:
        """The oldest version in use of the runs that are followed; {} where none is."""
        versions = [each.version for each in self._by_env.values() if isinstance(each, Following)]
        return {"distill/teacher_version": min(versions)} if versions else {}


async def find_teachers(
    config: OrchestratorConfig,
    run: RunDir,
    client: InferenceClient,
    base: str,
    tokenizer: ChatTokenizer,
    say: Callable[[str | Callable[[float], str | None] | None], None],
    cleanup: AsyncExitStack,
) -> Teachers | None:
    """The teachers of the run once all of them answer, ended by `cleanup`; None for a run that has none.

    `say` gets what is waited for. Raises RunFailed, ConfigError, or AdapterRefused.
    """
    if config.teaching is None:
        return None
    await unload_teachers(client, run)
    adapters, made = config.teacher_adapters, dict[TeacherConfig, Teacher]()
    for each in dict.fromkeys(config.teachers.values()):
        if each.base_url:
            outside = made[each] = OutsideTeacher(each)
            cleanup.push_async_callback(outside.close)
            say(lambda now, outside=outside: outside.waits_for)  # type: ignore[misc]
            await outside.begin(tokenizer, config.num_soft)
        elif each.is_adapter:
            place = adapters.index(each.model)
            adapter = made[each] = AdapterTeacher(client, run, place, each.model)
            if followed := each.follows:
                adapter = made[each] = Following(
                    client, run, place, each.model, _followed(run, followed), is_alone=len(adapters) == 1
                )
            cleanup.push_async_callback(adapter.close)
            await adapter.begin(say)
        else:
            made[each] = LocalTeacher(client, base)
    say(lambda now: client.trouble)
    return Teachers({name: made[each] for name, each in config.teachers.items()}, config.num_soft)


def _followed(run: RunDir, run_id: str) -> RunDir:
    if run_id == run.run_id:
        raise RunFailed(f"teacher: found '{run_id}@latest': must be another run, a run does not teach itself")
    try:
        return OutputDir(run.path.parent).run(run_id)
    except LayoutError as error:
        raise RunFailed(f"teacher: {error}") from error
