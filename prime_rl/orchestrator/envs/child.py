"""The process of an environment that is not ours: loads it, runs its rollouts, asks the orchestrator for each turn.

    python -m prime_rl.orchestrator.envs.child      (started by `process.ProcessEnvironment`; whose messages it takes)

Standard input and output carry the messages; what environment code prints goes to standard error. The process ends when
its input ends, which also happens when the orchestrator is killed: in good order if the environment lets it, else by
killing itself and all that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Never

from prime_rl.configs.agents import AGENT
from prime_rl.configs.envs import PLUGIN_GROUP
from prime_rl.configs.jsonl import JSONL
from prime_rl.orchestrator.envs import Environment, Example, Message, Split, process
from prime_rl.orchestrator.envs.base import Posted, as_messages, text_problem
from prime_rl.orchestrator.envs.checked import EnvironmentFault, Transient, check_outcome, fault_of
from prime_rl.utils.frames import HEADER_BYTES, frame, payload_len
from prime_rl.utils.process import inherit_orphans, kill_tree
from prime_rl.utils.runtime import cancel_all
from prime_rl.utils.text import one_line

# How long an environment may take to put its things away.
EXIT_GRACE_S = 5.0
SPLITS: tuple[Split, ...] = ("train", "eval")


class RemotePolicy:
    """The orchestrator's policy, for one rollout.

    Attributes:
        endpoint: base URL and key of the rollout's session at the gateway; None without one.
        posted: the rewards that came through that session.
    """

    def __init__(
        self, key: int, send: Callable[[process.Report], None], endpoint: tuple[str, str] | None = None
    ) -> None:
        self.answer_lens: list[int] = []
        self.endpoint = endpoint
        self.posted = Posted()
        self._key = key
        self._send = send
        self._turn = asyncio.Lock()
        self._answer: asyncio.Future[str] | None = None

    async def complete(self, messages: Sequence[Message]) -> str:
        """Ask the orchestrator for the turn after `messages` and wait for it; one turn at a time."""
        async with self._turn:
            self._answer = asyncio.get_running_loop().create_future()
            self._send(process.Ask(self._key, as_messages(messages)))
            return await self._answer

    def answer(self, text: str, num_tokens: int) -> None:
        """Note the length of the orchestrator's answer, and give it to the turn that waits for it."""
        self.answer_lens.append(num_tokens)
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(text)


class Host:
    """Runs the rollouts of one environment."""

    def __init__(self, env: Environment, send: Callable[[process.Report], None]) -> None:
        self._env = env
        self._send = send
        self._examples = {split: by_id(split, env.examples(split)) for split in SPLITS}
        self._rollouts: dict[int, tuple[RemotePolicy, asyncio.Task[None]]] = {}

    def ready(self) -> process.Ready:
        """Ids and levels of all examples."""
        found = self._examples.items()
        return process.Ready({split: [(each.id, each.level) for each in known.values()] for split, known in found})

    def take(self, request: process.Request) -> None:
        """Start a rollout, or tell one what is for it; it is ignored for one that has ended."""
        if isinstance(request, process.Start):
            endpoint = (request.base_url, request.session_key) if request.base_url else None
            policy = RemotePolicy(request.key, self._send, endpoint)
            task = asyncio.get_running_loop().create_task(self._run(request, policy))
            self._rollouts[request.key] = policy, task
            task.add_done_callback(lambda task: self._ended(request.key, task))
        elif not isinstance(request, process.Load) and (found := self._rollouts.get(request.key)):
            policy, task = found
            if isinstance(request, process.Answer):
                policy.answer(request.text, request.num_tokens)
            elif isinstance(request, process.Rewarded):
                policy.posted.take(request.reward)
            else:
                task.cancel()

    async def close(self) -> None:
        """Cancel all rollouts, and wait until they have ended."""
        await cancel_all(task for _, task in self._rollouts.values())

    def _ended(self, key: int, task: asyncio.Task[None]) -> None:
        del self._rollouts[key]
        if task.cancelled():
            self._lose(key, Transient("it was cancelled"))
        elif error := task.exception():  # one that is no Exception
            self._lose(key, fault_of(error))

    async def _run(self, start: process.Start, policy: RemotePolicy) -> None:
        try:
            outcome = await self._env.rollout(self._examples[start.split][start.example_id], policy)
            self._send(process.Done(start.key, check_outcome(outcome)))
        except (Exception, SystemExit) as error:  # an error of the environment: reported to the caller
            self._lose(start.key, fault_of(error, at_first_turn=not policy.answer_lens))

    def _lose(self, key: int, fault: EnvironmentFault) -> None:
        self._send(process.Lost(key, str(fault), type(fault).__name__))


def by_id(split: Split, examples: Sequence[Example]) -> dict[str, Example]:
    """The examples of a split. Raises ValueError for an id that is not text, or that two of them have."""
    found: dict[str, Example] = {}
    for number, example in enumerate(examples):
        where = f"example {number} of the {split} split"
        if problem := text_problem(f"the id of {where}", example.id):
            raise ValueError(problem)
        if not isinstance(example.level, int):
            raise ValueError(f"the level of {where} is {type(example.level).__name__}: must be an integer")
        if example.id in found:
            raise ValueError(f"{where} has the id {example.id!r} of an earlier one: each needs an id of its own")
        found[example.id] = example
    return found


async def load(request: process.Load, stack: contextlib.AsyncExitStack) -> Environment:
    """The environment, ready to run. Raises its errors."""
    if request.provider == "verifiers":
        from prime_rl.orchestrator.envs.verifiers_env import VerifiersEnvironment  # takes seconds

        env = VerifiersEnvironment(request.name, request.args, request.seed)
        await stack.enter_async_context(env.serving())
        return env
    if request.provider == "reasoning-gym":
        from prime_rl.orchestrator.envs.reasoning_gym_env import ReasoningGymEnvironment  # takes seconds

        return ReasoningGymEnvironment(request.name, request.args, request.seed)
    if request.provider == JSONL:
        from prime_rl.orchestrator.envs.jsonl_env import JsonlEnvironment

        return JsonlEnvironment(request.args, request.seed)
    if request.provider == AGENT:
        from prime_rl.orchestrator.envs.agent_env import AgentEnvironment

        inherit_orphans()  # what a program leaves behind, so that it is found and ended
        agent = AgentEnvironment(request.args, request.seed)
        stack.push_async_callback(agent.close)
        return agent
    found = list(importlib.metadata.entry_points(group=PLUGIN_GROUP, name=request.name))
    if not found:
        known = sorted(point.name for point in importlib.metadata.entry_points(group=PLUGIN_GROUP))
        raise LookupError(
            f"no installed package has an environment {request.name!r} (entry points of the group {PLUGIN_GROUP!r}: "
            f"{', '.join(known) or 'none'})"
        )
    make: Callable[[dict[str, Any], int], Environment] = found[0].load()
    return make(request.args, request.seed)


async def beat(interval_s: float, send: Callable[[process.Report], None]) -> Never:
    """Send a `Beat` every `interval_s` seconds, until it is cancelled."""
    while True:
        send(process.Beat())
        await asyncio.sleep(interval_s)


async def serve(requests: asyncio.Queue[process.Request | None], send: Callable[[process.Report], None]) -> None:
    """Until the requests end."""
    async with contextlib.AsyncExitStack() as stack:
        first = await requests.get()
        if not isinstance(first, process.Load):
            return
        try:
            host = Host(await load(first, stack), send)
            send(host.ready())
        except (Exception, SystemExit) as error:
            send(process.Refused(one_line(f"{type(error).__name__}: {error}", 2000)))
            logging.exception("cannot load %s", ":".join(filter(None, (first.provider, first.name))))
            return
        stack.push_async_callback(host.close)
        beating = asyncio.get_running_loop().create_task(beat(first.beat_s, send))
        stack.callback(beating.cancel)
        while (request := await requests.get()) is not None:
            host.take(request)


def read_requests(stream: BinaryIO, post: Callable[[process.Request | None], None]) -> None:
    """In its own thread, so that the end of the input is seen while environment code holds the event loop."""
    try:
        while len(header := stream.read(HEADER_BYTES)) == HEADER_BYTES:
            length = payload_len(header)
            if len(payload := stream.read(length)) < length:
                break
            post(process.decode_request(payload))
    except Exception:  # nothing more can be read: that is the end of the input too
        logging.exception("cannot read the messages of the orchestrator")
    post(None)
    threading.Event().wait(EXIT_GRACE_S)
    kill_tree(os.getpid())


async def run(stream_in: BinaryIO, stream_out: BinaryIO) -> None:
    """Serve the requests in `stream_in`, which a thread reads, and report to `stream_out`, until the input ends."""
    loop = asyncio.get_running_loop()
    requests: asyncio.Queue[process.Request | None] = asyncio.Queue()

    def post(request: process.Request | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(requests.put_nowait, request)

    def send(report: process.Report) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody reads any more: the input ends too
            stream_out.write(frame(report))
            stream_out.flush()

    threading.Thread(target=read_requests, args=(stream_in, post), daemon=True).start()
    await serve(requests, send)


def main() -> None:
    """Keep standard input and output for the messages, serve, then kill this process and all that it started."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    stream_in, stream_out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(stream_in, stream_out))
    # Whatever environment code has left behind goes, its threads and exit handlers too.
    sys.stderr.flush()
    kill_tree(os.getpid())


if __name__ == "__main__":
    main()
