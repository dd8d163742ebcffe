"""An environment in its own process: `jsonl`, `agent`, `verifiers:TASKSET`, `reasoning-gym:FAMILY` and `plugin:NAME`.

A process and not threads: code that hangs can be killed with all that it started, code that crashes takes nothing with
it, a heavy library (verifiers: seconds and hundreds of megabytes) is not loaded into the orchestrator, and the API key
of inference is not in its environment, nor is any other variable that was not named for it. One process runs all
rollouts of the environment side by side, as they mostly wait for the policy. When one of them holds up the event loop
of the process for half of `timeout_s`, or does not end after it was cancelled, or the process dies, a new process is
started. Such a death counts as one dropped rollout, that whose code has been at work the longest; the others in the
process are lost without fault of theirs (`Interrupted`), and made again.

The built-in environments are ours and quick: they run inside the orchestrator.

Where the environment runs an agent, each rollout has a session (`Sessions`): calls of its endpoint are answered by the
orchestrator, and what is posted as a reward is passed on to the process.

Messages between the orchestrator and the process are frames (`utils.frames`). To the process: a `Load` first, then
`Start`, `Answer`, `Rewarded` and `Cancel`. From it: `Ready` or `Refused` first, then `Ask`, and `Done` or `Lost` once
for each rollout, and all the time `Beat`. `key` is a rollout. No pickle: what a message can be stands here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from prime_rl.configs.base import ConfigError, ConfigProblem
from prime_rl.configs.envs import MODULES, EnvConfig, SessionLimits
from prime_rl.contract import calls
from prime_rl.contract.calls import Reward
from prime_rl.orchestrator.envs.base import AnswersCalls, Example, Message, Outcome, Policy, Posted, Split
from prime_rl.orchestrator.envs.checked import FAULTS, EnvironmentFault, Interrupted, TimedOut, Transient
from prime_rl.utils.frames import frame, read_payload
from prime_rl.utils.process import end_orphans, kill_tree, orphans
from prime_rl.utils.runtime import Background, missing


class Load(msgspec.Struct, tag=True):
    """The environment to make (`provider`: its id up to the colon), and how often to send a `Beat`."""

    provider: str
    name: str
    args: dict[str, Any]
    seed: int
    beat_s: float


class Start(msgspec.Struct, tag=True):
    """Start a rollout of one example. It ends with `Done` or `Lost`.

    `base_url` and `session_key` are of its session at the gateway; "" without one.
    """

    key: int
    split: Split
    example_id: str
    base_url: str = ""
    session_key: str = ""


class Answer(msgspec.Struct, tag=True):
    """The policy's turn, for the last `Ask` of the rollout, and its number of tokens."""

    key: int
    text: str
    num_tokens: int


class Rewarded(msgspec.Struct, tag=True):
    """A reward was posted in the session of a rollout."""

    key: int
    reward: Reward


class Cancel(msgspec.Struct, tag=True):
    """End a rollout whose outcome is not needed."""

    key: int


class Ready(msgspec.Struct, tag=True):
    """The environment is there, with the id and level of each of its examples."""

    examples: dict[Split, list[tuple[str, int]]]


class Refused(msgspec.Struct, tag=True):
    """The environment was not found, or its arguments are invalid."""

    reason: str


class Ask(msgspec.Struct, tag=True):
    """The environment requests the policy's next turn."""

    key: int
    messages: list[Message]


class Done(msgspec.Struct, tag=True):
    """The rollout has its score."""

    key: int
    outcome: Outcome


class Lost(msgspec.Struct, tag=True):
    """The environment's code failed. `kind` is one of `checked.FAULTS`."""

    key: int
    reason: str
    kind: str


class Beat(msgspec.Struct, tag=True):
    """The event loop of the process still turns."""


Request = Load | Start | Answer | Rewarded | Cancel
Report = Ready | Refused | Ask | Done | Lost | Beat

decode_request = msgspec.msgpack.Decoder(Request).decode
decode_report = msgspec.msgpack.Decoder(Report).decode

logger = logging.getLogger("orchestrator")

# Downloads of data and programs are part of it.
LOAD_TIMEOUT_S = 1800.0
# How long a cancelled rollout may take to end, with all that it started.
CANCEL_GRACE_S = 15.0
# A process that sends no beat over so many looks, together half of `timeout_s`, hangs.
MAX_MISSED_LOOKS = 4
# Upper limit of the time between beats.
MAX_BEAT_S = 1.0
# How long the process may take to put its things away when the run ends; it kills itself after five seconds.
EXIT_GRACE_S = 6.0
# What every process needs to find its programs, folders, language, offline caches and share of the processors; and the
# marks by which the supervisor finds what belongs to a daemon.
BASE_VARIABLES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP"),
        *("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONUNBUFFERED", "LD_LIBRARY_PATH"),
        *("HF_HOME", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
        *("XDG_CACHE_HOME", "TOKENIZERS_PARALLELISM", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
        *("PRL_OUTPUT_DIR", "PRL_DAEMON", "SPT_NOENV"),
    )
)
BASE_PREFIXES = ("LC_", "OMP_", "MKL_", "OPENBLAS_")
# The processes of environments that this one has started, and has not reaped.
_STARTED: set[int] = set()


def environment_of_its_own(environ: Mapping[str, str], named: Collection[str]) -> dict[str, str]:
    """The part of `environ` for a process of an environment: what every process needs, and what is named for it."""
    kept = {
        name: value
        for name, value in environ.items()
        if name in BASE_VARIABLES or name in named or name.startswith(BASE_PREFIXES)
    }
    return kept | {"PYTHONUTF8": "1"}  # files are UTF-8 whatever the locale


class _Child:
    """One process of the environment `env_id`, and the rollouts in it.

    Attributes:
        ready: the examples, or the error.
        inboxes: what is reported of each rollout that has not ended, the end of the process too.
        dead: it ends, or has ended.
    """

    def __init__(self, process: asyncio.subprocess.Process, env_id: str, tasks: Background) -> None:
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.inboxes: dict[int, asyncio.Queue[Ask | Done | Lost | Transient]] = {}
        self.dead = False
        # Rollouts whose code is at work, the longest first: it takes what it is sent in that order.
        self._at_work: dict[int, None] = {}
        self._num_reports = 0
        self._process = process
        self._env_id = env_id
        self._tasks = tasks
        self._death: Transient | None = None
        _STARTED.add(process.pid)

    def send(self, request: Request) -> None:
        assert self._process.stdin is not None
        if isinstance(request, Start | Answer):
            self._at_work[request.key] = None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(frame(request))

    async def rollout(self, start: Start, policy: Policy) -> Outcome:
        """Its outcome. Raises EnvironmentFault, and what the policy raises: then it is cancelled in the process too."""
        if self.dead:
            raise Interrupted("its process has ended")
        inbox = self.inboxes[start.key] = asyncio.Queue()
        self.send(start)
        try:
            while isinstance(report := await inbox.get(), Ask):
                text = await policy.complete(report.messages)
                self.send(Answer(start.key, text, policy.answer_lens[-1]))
        except BaseException:
            self.send(Cancel(start.key))
            self._tasks.start(self._ended(start.key), f"cancelling a rollout of env {self._env_id}")
            raise
        del self.inboxes[start.key]
        if isinstance(report, Done):
            return report.outcome
        raise FAULTS.get(report.kind, EnvironmentFault)(report.reason) if isinstance(report, Lost) else report

    async def _ended(self, key: int) -> None:
        """Wait for the end of a cancelled rollout, or kill the process."""
        try:
            async with asyncio.timeout(CANCEL_GRACE_S):
                while isinstance(await self.inboxes[key].get(), Ask):
                    pass
        except TimeoutError:
            if not self.dead:
                logger.warning("env %s: a cancelled rollout does not end: restarting its process", self._env_id)
                self.kill()
        finally:
            del self.inboxes[key]

    async def read(self) -> None:
        """Hand out what the process reports, until it ends."""
        stream = self._process.stdout
        assert stream is not None
        try:
            while True:
                self._take(decode_report(await read_payload(stream)))
        except asyncio.IncompleteReadError:
            pass
        except Exception as error:  # whatever it is, the rollouts in the process wait for its end
            self._death = Transient(f"the messages of its process cannot be read: {type(error).__name__}: {error}")
            kill_tree(self._process.pid)
        code = await self._process.wait()
        _STARTED.discard(self._process.pid)
        end_orphans(_STARTED, lambda session: session == self._process.pid)
        self._end(self._death or Transient(f"its process ended with exit code {code}"))

    async def watch(self, hang_s: float) -> None:
        """Kill the process when it hangs for `hang_s`, once it is ready, or is never ready."""
        if not (await asyncio.wait([self.ready], timeout=LOAD_TIMEOUT_S))[0]:
            self._death = TimedOut(f"loading it took longer than {LOAD_TIMEOUT_S:g} s, so its process was killed")
            kill_tree(self._process.pid)
        num_missed = seen = 0
        while not self.dead and num_missed < MAX_MISSED_LOOKS:
            await asyncio.sleep(hang_s / MAX_MISSED_LOOKS)
            num_missed = num_missed + 1 if self._num_reports == seen else 0
            seen = self._num_reports
        if not self.dead:
            reason = f"its code blocked its process for {hang_s:g} s, half of timeout_s, so it was killed"
            self._death = TimedOut(reason)
            kill_tree(self._process.pid)

    def kill(self) -> None:
        self.dead = True
        kill_tree(self._process.pid)

    async def close(self) -> None:
        """End the process in good order, or not in good order."""
        self.dead = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(EXIT_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def _take(self, report: Report) -> None:
        self._num_reports += 1
        orphans(_STARTED)  # what has ended of them is reaped: an environment may leave behind thousands
        if isinstance(report, Ready | Refused):
            if self.ready.done():
                raise ValueError("it is ready a second time")
            if isinstance(report, Ready):
                self.ready.set_result(report)
            else:
                self.ready.set_exception(Transient(report.reason))
        elif not isinstance(report, Beat):
            self._at_work.pop(report.key, None)
            if inbox := self.inboxes.get(report.key):
                inbox.put_nowait(report)

    def _end(self, death: Transient) -> None:
        """Fail all waiters. An unexpected death counts once, so a second one ends the run."""
        keys = [] if self.dead else [key for key in (*self._at_work, *self.inboxes) if key in self.inboxes]
        self.dead = True
        if not self.ready.done():
            self.ready.set_exception(death)
        for key, inbox in self.inboxes.items():
            inbox.put_nowait(death if key in keys[:1] else Interrupted(str(death)))


class Session(Protocol):
    """The address and key with which the client of a rollout asks the policy.

    Attributes:
        num_requests: those that it has made.
        idle_s: seconds in which nothing has happened; 0 while a call is in flight.
    """

    id: str
    base_url: str
    key: str
    num_requests: int

    @property
    def idle_s(self) -> float:
        """See above."""


class Sessions(Protocol):
    """Whoever opens sessions at the gateway.

    Attributes:
        on_open: makes one for a client outside; None: the run takes none.
        num_places: rollouts that wait for such a client.
    """

    on_open: Callable[[calls.Open], Awaitable[calls.Opened]] | None
    num_places: int

    async def served(self) -> None:
        """Wait until the gateway is there."""

    def open(
        self, policy: AnswersCalls, limits: SessionLimits, on_reward: Callable[[Reward], None], example: str
    ) -> AbstractAsyncContextManager[Session]:
        """A session for as long as the block runs, whose calls `policy` answers."""


class ProcessEnvironment:
    """`[[env]]` with the id jsonl or agent, or one of the form PROVIDER:NAME. `start` it first, `close` it at the end.

    Args:
        hidden: names of environment variables that the process must not see, whatever `env_vars` names.
        sessions: where its rollouts ask the policy through the gateway.
    """

    def __init__(
        self, config: EnvConfig, seed: int, *, hidden: Sequence[str] = (), sessions: Sessions | None = None
    ) -> None:
        self.provider, _, name = config.id.partition(":")
        self.id = config.id
        self._hang_s = config.timeout_s / 2
        beat_s = min(MAX_BEAT_S, self._hang_s / MAX_MISSED_LOOKS / 2)
        self._load = Load(self.provider, name, config.args, seed, beat_s)
        self._sessions = sessions if config.needs_gateway else None
        self._limits = config.session_limits
        self._named = set(config.variables) - set(hidden)
        self._examples: dict[Split, list[Example]] = {}
        self._child: _Child | None = None
        self._starting = asyncio.Lock()
        self._keys = itertools.count()
        self._tasks = Background()

    def examples(self, split: Split) -> Sequence[Example]:
        """The examples by their ids; their content is in the process only."""
        return self._examples[split]

    async def start(self) -> None:
        """Start the process and wait until it has the environment. Raises ConfigError."""
        source = f"env {self.id!r}"
        if sentence := missing("environments", *MODULES.get(self.provider, [])):
            raise ConfigError(source, [ConfigProblem("", sentence)])
        try:
            child = await self._living()
        except EnvironmentFault as fault:
            raise ConfigError(source, [ConfigProblem("", str(fault))]) from fault
        self._examples = {
            split: [Example(example_id, [], "", {"split": split}, level) for example_id, level in examples]
            for split, examples in child.ready.result().examples.items()
        }

    async def ready(self) -> None:
        """Wait for the gateway, where its rollouts need that."""
        if self._sessions is not None:
            await self._sessions.served()

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        """The environment's rollout, in its process. Raises EnvironmentFault, and what the policy raises."""
        child = await self._living()
        start = Start(next(self._keys), example.info["split"], example.id)
        if self._sessions is None:
            return await child.rollout(start, policy)
        assert isinstance(policy, AnswersCalls)
        posted = Posted()

        def post(reward: Reward) -> None:
            posted.take(reward)
            child.send(Rewarded(start.key, reward))

        async with self._sessions.open(policy, self._limits, post, example.id) as session:
            start.base_url, start.session_key = session.base_url, session.key
            return replace(await child.rollout(start, policy), answer_rewards=posted.by_answer)

    async def close(self) -> None:
        """End the process, which is killed after EXIT_GRACE_S, and what reads from it and watches it."""
        child, self._child = self._child, None
        if child is not None:
            await child.close()
        await self._tasks.cancel()

    async def _living(self) -> _Child:
        """The process, started if it does not run. Raises EnvironmentFault when it cannot be started."""
        async with self._starting:
            if self._child is None or self._child.dead:
                logger.info("env %s: loading %s (takes some seconds)", self.id, self.provider)
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "prime_rl.orchestrator.envs.child"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    env=environment_of_its_own(os.environ, self._named),
                    start_new_session=True,  # Ctrl-C is for the orchestrator, which ends it in good order
                )
                self._child = _Child(process, self.id, self._tasks)
                self._child.send(self._load)
                self._tasks.start(self._child.read(), f"reading from the process of env {self.id}")
                self._tasks.start(self._child.watch(self._hang_s), f"watching the process of env {self.id}")
        child = self._child
        await asyncio.shield(child.ready)
        return child
