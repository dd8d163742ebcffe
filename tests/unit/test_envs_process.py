"""Environments in their own process: what they may do wrong there, and that nothing of them stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from daemons.process import daemon_environment
from prime_rl.configs.base import ConfigError
from prime_rl.configs.envs import EnvConfig
from prime_rl.orchestrator.envs import Example, Message, ProcessEnvironment
from prime_rl.orchestrator.envs.checked import (
    CheckedEnvironment,
    EnvironmentFault,
    ExampleUnusable,
    Interrupted,
    TimedOut,
    Transient,
)
from prime_rl.orchestrator.envs.process import Ask, Cancel, environment_of_its_own, frame
from tests.orchestrator_support import until
from tests.patience import PATIENCE_S

# A user's environment; the word of its example selects what it does.
MODULE = """
import asyncio, os, subprocess, sys, time

from prime_rl.orchestrator.envs.base import Example, Outcome

WORDS = "good raise nan text hang exit slow deaf key credits short down odd cut".split()
# What an example asks with, in place of its word.
ASKS = {"null": None, "number": 3, "half": "a\\ud800", "whole": [{}], "parts": [{"type": "text", "text": "p"}]}


class Env:
    id = "somebody's"

    def __init__(self, args, seed):
        if args.get("refuse"):
            raise ValueError("no such args")
        if args.get("child"):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print("printed to nobody's stream")
        with open(__file__ + ".starts", "a") as starts:
            starts.write("started ")
        self.args = args

    def examples(self, split):
        ids = [*WORDS, *ASKS.keys() - WORDS, *self.args.get("more", [])]
        return [Example(word, [{"role": "user", "content": ASKS.get(word, word)}], word) for word in ids]

    async def rollout(self, example, policy):
        if example.id == "deaf":
            while True:
                try:
                    await policy.complete(example.messages)
                except asyncio.CancelledError:
                    pass
        first = await policy.complete(example.messages)
        messages = [*example.messages, {"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
        await policy.complete(messages)
        word = example.id
        if word == "down":
            raise RuntimeError("no judge") from ConnectionRefusedError()
        if word == "cut":
            return Outcome(0.5, output="half a character: \\ud800")
        if word == "odd":
            raise type("Odd", (BaseException,), {})("no Exception")
        if word == "raise":
            raise RuntimeError("\\x1b[31mred")
        if word == "hang":
            time.sleep(600)
        if word == "exit":
            os._exit(7)
        if word == "slow":
            await asyncio.sleep(600)
        if word in ("credits", "short"):
            own = [[-1.0] * (policy.answer_lens[0] - (word == "short")), 0.25]
            return Outcome(0.5, rewards={"form": 1.0, "right": 0.25}, advantages=own)
        reward = {"nan": float("nan"), "text": "much"}.get(word, 0.5)
        return Outcome(reward, {"key_seen": float("SECRET_KEY" in os.environ)}, output="printed")
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with an entry point, as pip leaves it."""
    (tmp_path / "somebodys_envs.py").write_text(MODULE)
    info = tmp_path / "somebodys_envs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-envs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[prime_rl.environments]\nwords = somebodys_envs:Env\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")
    monkeypatch.setenv("SECRET_KEY", "secret")


@contextlib.asynccontextmanager
async def running(name: str = "words", timeout_s: float = 60.0, **args: Any) -> AsyncIterator[CheckedEnvironment]:
    config = EnvConfig.model_validate({"id": f"plugin:{name}", "args": args, "timeout_s": timeout_s})
    env = ProcessEnvironment(config, seed=1, hidden=["SECRET_KEY"])
    try:
        await env.start()
        yield CheckedEnvironment(env, config, max_failure_share=1.0)
    finally:
        await env.close()


class Says:
    """A policy that answers at once, and remembers; `gate` holds it up."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.seen: list[Sequence[Message]] = []
        self.answer_lens: list[int] = []

    async def complete(self, messages: Sequence[Message]) -> str:
        self.seen.append(messages)
        await self.gate.wait()
        self.answer_lens.append(2)
        return f"answer {len(messages)}"


def example_of(env: CheckedEnvironment, word: str) -> Example:
    return next(example for example in env.examples("train") if example.id == word)


async def test_rollouts_of_several_turns_and_every_fault_but_a_hang() -> None:
    async with running() as env:
        policy = Says()
        good = await env.rollout(example_of(env, "good"), policy)
        assert (good.reward, good.metrics, good.output) == (0.5, {"key_seen": 0.0}, "printed")
        assert json.loads(json.dumps(policy.seen)) == [
            [{"role": "user", "content": "good"}],
            [
                {"role": "user", "content": "good"},
                {"role": "assistant", "content": "answer 1"},
                {"role": "user", "content": "again"},
            ],
        ]
        for word, message in [
            ("raise", "RuntimeError: red"),
            ("odd", "Odd: no Exception"),
            ("cut", "UnicodeEncodeError"),
            ("nan", "reward is nan"),
            ("text", "is str instead of a num"),
            ("short", "the advantage of turn 1 has length 1, but its answer has 2 tokens"),
        ]:
            with pytest.raises(EnvironmentFault, match=message):
                await env.rollout(example_of(env, word), Says())
        # A process that dies: one rollout pays for it, the other is lost without fault, and then there is a new one.
        waits = Says()
        waits.gate.clear()
        beside = asyncio.create_task(env.rollout(example_of(env, "good"), waits))
        await until(lambda: bool(waits.seen), "the rollout beside")
        results = await asyncio.gather(
            env.rollout(example_of(env, "exit"), Says()),
            env.rollout(example_of(env, "exit"), Says()),
            return_exceptions=True,
        )
        waits.gate.set()
        results += await asyncio.gather(beside, return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["Interrupted", "Interrupted", "Transient"]
        assert any("its process ended with exit code 7" in str(result) for result in results)
        assert (await env.rollout(example_of(env, "good"), Says())).reward == 0.5
        assert env.num_dropped == 7
        own = await env.rollout(example_of(env, "credits"), Says())
        assert (own.rewards, own.advantages) == ({"form": 1.0, "right": 0.25}, ([-1.0, -1.0], 0.25))
        assert (good.rewards, good.advantages) == ({}, ())


NOT_SENT = [
    ("null", ExampleUnusable, "the content of message 0 is NoneType: must be a string"),
    ("number", ExampleUnusable, "the content of message 0 is int: must be a string"),
    ("whole", ExampleUnusable, "the content of message 0 is list: must be a string"),
    ("half", ExampleUnusable, "the content of message 0 has a surrogate at character 1"),
    ("down", Transient, "RuntimeError: no judge"),
    ("raise", EnvironmentFault, "RuntimeError: red"),
]


async def test_what_cannot_be_sent_costs_its_example_and_not_the_process(tmp_path: Path) -> None:
    """One fault after the other, each beside a rollout that goes on."""
    async with running() as env:
        for word, kind, message in NOT_SENT:
            waits = Says()
            waits.gate.clear()
            beside = asyncio.create_task(env.rollout(example_of(env, "good"), waits))
            await until(lambda waits=waits: bool(waits.seen), "the rollout beside")  # type: ignore[misc]
            with pytest.raises(EnvironmentFault, match=message) as caught:
                await env.rollout(example_of(env, word), Says())
            assert type(caught.value) is kind, word
            waits.gate.set()
            assert (await beside).reward == 0.5, word
            parts = Says()
            await env.rollout(example_of(env, "parts"), parts)
            assert parts.seen[0] == [{"role": "user", "content": "p"}], word
    assert (tmp_path / "somebodys_envs.py.starts").read_text().split() == ["started"]


async def test_a_message_that_is_too_large_to_send_costs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.utils.frames.MAX_FRAME_BYTES", 100)
    assert frame(Ask(1, [])) and len(frame(Cancel(1))) < 100
    with pytest.raises(ValueError, match=r"a message of \d+ bytes: at most 100 are allowed"):
        frame(Ask(1, [{"role": "user", "content": "x" * 100}]))


def processes() -> set[psutil.Process]:
    return {process for process in psutil.Process().children(recursive=True) if lives(process)}


def lives(process: psutil.Process) -> bool:
    """Also asked of one that ends in that very moment."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def ended(of: set[psutil.Process]) -> None:
    """Processes that an environment starts in their own session are orphans when their parent is gone."""
    await until(lambda: not any(map(lives, of)), "the processes to end")


def with_step_limit(env: CheckedEnvironment, timeout_s: float) -> CheckedEnvironment:
    """The same process, with another limit for a step than the one by which the process hangs."""
    return CheckedEnvironment(env._env, EnvConfig(id="plugin:words", timeout_s=timeout_s), max_failure_share=1.0)


async def test_code_that_hangs_is_killed_with_all_that_it_started() -> None:
    before = processes()
    async with running(timeout_s=2.0, child=True) as hasty:
        env = with_step_limit(hasty, PATIENCE_S)  # a busy machine takes longer than that to start a process again
        started = processes() - before
        assert len(started) == 2
        waits = Says()
        waits.gate.clear()
        beside = asyncio.create_task(env.rollout(example_of(env, "good"), waits))
        await until(lambda: bool(waits.seen), "the rollout beside, which waits for the policy")
        with pytest.raises(TimedOut, match=r"blocked its process for 1 s"):
            await env.rollout(example_of(env, "hang"), Says())
        waits.gate.set()
        with pytest.raises(Interrupted):
            await beside
        await ended(started)
        assert isinstance(env._env, ProcessEnvironment)
        env._env._hang_s = PATIENCE_S  # nor is the next process to be killed because it gets no CPU
        assert (await env.rollout(example_of(env, "good"), Says())).reward == 0.5
        started = processes() - before
        assert len(started) == 2
    await ended(started)


async def test_a_rollout_that_lets_go_costs_nothing_and_one_that_does_not_costs_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = processes()
    async with running() as env:
        hasty = with_step_limit(env, 1.0)
        started = processes() - before
        waits = Says()
        waits.gate.clear()
        beside = asyncio.create_task(env.rollout(example_of(env, "good"), waits))
        await until(lambda: bool(waits.seen), "the rollout beside")
        with pytest.raises(EnvironmentFault, match=r"a step took longer than timeout_s = 1"):
            await hasty.rollout(example_of(env, "slow"), Says())
        waits.gate.set()
        assert (await beside).reward == 0.5

        waits.gate.clear()
        monkeypatch.setattr("prime_rl.orchestrator.envs.process.CANCEL_GRACE_S", 0.1)
        beside = asyncio.create_task(env.rollout(example_of(env, "good"), waits))
        unanswered = Says()
        unanswered.gate.clear()
        deaf = asyncio.create_task(env.rollout(example_of(env, "deaf"), unanswered))
        await until(lambda: bool(unanswered.seen), "the rollout that does not let go")
        deaf.cancel()
        with pytest.raises(asyncio.CancelledError):
            await deaf
        await ended(started)
        waits.gate.set()
        with pytest.raises(Interrupted):
            await beside
        assert hasty.num_dropped == 1


def test_its_text_files_are_utf8_whatever_the_locale(tmp_path: Path) -> None:
    environ = {"LC_ALL": "en_US.ISO-8859-1", "PYTHONUTF8": "0"}
    assert environment_of_its_own(environ, ["PYTHONUTF8"]) == {"LC_ALL": "en_US.ISO-8859-1", "PYTHONUTF8": "1"}
    assert daemon_environment(tmp_path, "trainer")["PYTHONUTF8"] == "1"


HOST = """
import asyncio
from prime_rl.configs.envs import EnvConfig
from prime_rl.orchestrator.envs import ProcessEnvironment

async def main():
    env = ProcessEnvironment(EnvConfig(id="plugin:words", args={"child": True}), seed=1)
    await env.start()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


# As an orchestrator that goes on when a process of an environment has ended by itself and left another one behind.
GOES_ON = """
import asyncio, sys
from pathlib import Path
from subprocess import PIPE
from prime_rl.orchestrator.envs.process import _Child
from prime_rl.utils.process import inherit_orphans
from prime_rl.utils.runtime import Background

async def main():
    inherit_orphans()
    command = [sys.executable, "-c", *sys.argv[1:]]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True)
    child = _Child(process, "words", Background())
    await child.read()
    assert "its process ended with exit code 0" in str(child.ready.exception())
    assert not Path("/proc", Path(sys.argv[2]).read_text()).exists()

asyncio.run(main())
"""
LEAVES = """
import os, sys
if (pid := os.fork()) == 0:
    os.close(1)
    os.execv("/bin/sleep", ["sleep", "600"])
with open(sys.argv[1], "w") as file:
    file.write(str(pid))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are inherited on Linux only")
def test_what_a_process_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GOES_ON, LEAVES, str(tmp_path / "pid")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")


async def test_nothing_outlives_an_orchestrator_that_is_killed() -> None:
    host = await asyncio.create_subprocess_exec(sys.executable, "-c", HOST, stdout=asyncio.subprocess.PIPE)
    assert host.stdout is not None and await host.stdout.readline() == b"ready\n"
    started = set(psutil.Process(host.pid).children(recursive=True))
    assert len(started) == 2
    host.kill()
    await host.wait()
    await ended(started)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("words", {"refuse": True}, "env 'plugin:words': ValueError: no such args"),
        ("letters", {}, r"no installed package has an environment 'letters' .*: words\)"),
        ("words", {"more": ["key"]}, r"example \d+ of the train split has the id 'key' of an earlier one: each needs"),
        ("words", {"more": [7]}, r"the id of example \d+ of the train split is int: must be a string"),
    ],
)
async def test_what_cannot_be_loaded_says_why(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        async with running(name, **args):
            raise AssertionError
