"""A rollout is as simple to follow as docs/explanation/rollout.md shows: its files, and the objects of one request."""

from __future__ import annotations

import asyncio
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from prime_rl.configs.base import SamplingConfig
from prime_rl.configs.envs import EnvConfig
from prime_rl.orchestrator.envs import load_environment
from prime_rl.orchestrator.envs.checked import CheckedEnvironment
from prime_rl.orchestrator.orchestrator import run_to_the_end
from prime_rl.orchestrator.policy import ChatTokenizer, FirstTurn, TurnSampler
from prime_rl.orchestrator.recorder import PolicySession
from tests.orchestrator_support import (
    FakeInference,
    make_client,
    make_model,
    make_policy,
    make_run,
    run_config,
    serving,
    stand_in_trainer,
)
from tests.patience import PATIENCE_S
from tests.system_support import ROOT

ORCHESTRATOR = ROOT / "prime_rl" / "orchestrator"
PAGE = (ROOT / "docs" / "explanation" / "rollout.md").read_text()
LISTED = [str(ROOT / path) for path in re.findall(r"^\| `(prime_rl/[\w/]+\.py)` \|", PAGE, re.M)]
MOST_FILES, MOST_OBJECTS = 12, 5


async def test_a_rollouts_life_is_in_at_most_twelve_files_and_passes_through_each(tmp_path: Path) -> None:
    assert 0 < len(LISTED) <= MOST_FILES and len(set(LISTED)) == len(LISTED)
    model, run = make_model(tmp_path / "model"), make_run(tmp_path / "workspace")
    called: set[str] = set()
    async with serving(FakeInference(model)) as url:
        trainer = asyncio.create_task(stand_in_trainer(run))
        config = run_config(model, max_steps=1, client={"base_url": url})
        sys.setprofile(lambda frame, event, arg: called.add(frame.f_code.co_filename))
        try:
            assert await asyncio.wait_for(run_to_the_end(config, run, lambda: False), PATIENCE_S) == 0
        finally:
            sys.setprofile(None)
        trainer.cancel()
    assert run.rollout_file(1).exists()
    assert set(LISTED) <= called, "the page lists a file that a rollout does not pass through"


class _Watched(httpx.AsyncHTTPTransport):
    """Real HTTP that keeps the frames from which a request came, outermost first: `sender`, then its own task."""

    frames: Sequence[FrameType] = ()

    def __init__(self, sender: asyncio.Task[Any]) -> None:
        super().__init__()
        self._sender = sender

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        own = [frame for frame, _ in traceback.walk_stack(sys._getframe())]
        self.frames = [*_awaiting(self._sender), *reversed(own)]
        return await super().handle_async_request(request)


def _awaiting(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """The frames of the coroutines that a suspended task is in."""
    coroutine: Any = task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        yield frame
        coroutine = coroutine.cr_await


async def test_from_complete_to_the_request_there_are_at_most_five_objects(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    tokenizer, config = ChatTokenizer.load(str(model)), EnvConfig(id="reverse-text")
    env = load_environment(config, seed=0)
    checked = CheckedEnvironment(env, config, max_failure_share=1.0)
    sender = asyncio.current_task()
    assert sender is not None
    async with serving(FakeInference(model)) as url:
        transport = _Watched(sender)
        client = make_client(url, tmp_path, transport=transport)
        policy = make_policy(client, make_run(tmp_path), model)
        turns = TurnSampler(client, policy, SamplingConfig(max_tokens=8), seq_len=512)
        session = PolicySession(turns, tokenizer, seed=0, first_turn=FirstTurn(1))
        await session.rollout(checked, env.examples("train")[0])
        await client.close()

    ours = [frame for frame in transport.frames if Path(frame.f_code.co_filename).is_relative_to(ORCHESTRATOR)]
    last_of_env = max(at for at, frame in enumerate(ours) if frame.f_locals.get("self") is env)
    passed = ours[last_of_env + 1 :]
    objects = list({id(each): each for frame in passed if (each := frame.f_locals.get("self")) is not None}.values())
    names = [type(each).__name__ for each in objects]
    assert len(objects) <= MOST_OBJECTS, names
    sentence = PAGE.partition("`policy.complete()` in an environment passes ")[2].partition(". ")[0]
    assert names[1:] == re.findall(r"`([A-Z]\w+)`", sentence), "the page names others"
    assert {frame.f_code.co_filename for frame in passed} <= set(LISTED), "the page lacks a file"
