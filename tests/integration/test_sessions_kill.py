"""Fifty sessions at once, from another process, while gateway, orchestrator and inference are killed in turn."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from prime_rl.contract.layout import list_rollout_steps, list_steps
from prime_rl.contract.status import DaemonStatus, GatewayStatus, InferenceStatus, RunStatus, read_status
from prime_rl.contract.types import TrainingSample, read_batch
from tests.patience import PATIENCE_S
from tests.sessions_main import NUM_TURNS, NUM_USERS, reward_of
from tests.system_support import ROOT, Workspace

pytestmark = pytest.mark.slow

MAX_TOKENS = 4
# As many sessions have a place as there are users.
RUN = """\
batch_size = {half}
rollouts_per_example = 1
max_steps = 1000
max_async_level = 1
advantage = {{ type = "batch" }}
[model]
name = "{model}"
[sampling]
max_tokens = {max_tokens}
[ckpt]
keep_rollouts = true
[[env]]
id = "sessions"
"""
# What a client may be told; others would be faults of the product. Each is JSON.
CLOSED, AWAY, BUSY = 410, 503, 429


def names_of(events: Sequence[dict[str, Any]], event: str) -> set[str]:
    return {each["name"] for each in events if each["event"] == event}


class Application:
    """The users, in a process of their own, and what they have noted so far."""

    def __init__(self, folder: Path, endpoint: dict[str, Any]) -> None:
        self._log, self._stop = folder / "application.jsonl", folder / "application.stop"
        self._log.touch()
        words = [endpoint["url"], endpoint["key"], str(self._log), str(self._stop)]
        command = [sys.executable, "-m", "tests.sessions_main", *words]
        self._process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})

    def events(self) -> list[dict[str, Any]]:
        assert self._process.poll() in (None, 0)
        *lines, _ = self._log.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines]

    def num_done_since(self, seen: int) -> int:
        """Sessions that were opened after the event of that number, and have their reward."""
        events = self.events()[seen:]
        return len(names_of(events, "opened") & names_of(events, "rewarded"))

    def in_work(self) -> set[str]:
        """Sessions that were opened and answered, and have not ended."""
        events = self.events()
        closed = names_of([event for event in events if event.get("status") == CLOSED], "refused")
        return names_of(events, "answered") - names_of(events, "rewarded") - closed

    def end(self) -> None:
        self._stop.touch()
        assert self._process.wait(PATIENCE_S) == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def application(workspace: Workspace, folder: Path) -> Iterator[Application]:
    file = folder / "a.toml"
    file.write_text(RUN.format(max_tokens=MAX_TOKENS, half=NUM_USERS // 2, model=workspace.model))
    workspace.up()
    workspace.prl("runs", "add", str(file))
    gateway = workspace.paths.gateway_status
    workspace.wait(lambda: (found := read_status(gateway, GatewayStatus)) is not None and found.num_runs == 1, "a link")
    made = Application(folder, workspace.json("runs", "endpoint", "run_a"))
    try:
        yield made
    finally:
        made.kill()


def pid_of(workspace: Workspace, daemon: str) -> int:
    """Of a daemon that is there to be used; 0 while it is not."""
    status: RunStatus | InferenceStatus | GatewayStatus | None
    if daemon == "gateway":
        status = read_status(workspace.paths.gateway_status, GatewayStatus)
    elif daemon == "inference":
        status = read_status(workspace.paths.inference_status, InferenceStatus)
    else:
        status = read_status(workspace.run_dir(daemon).status, RunStatus)
    return status.pid if status and status.state in ("running", "serving") else 0


def check_clients(events: Sequence[dict[str, Any]], at_kill: dict[str, set[str]]) -> None:
    """Each session went on, or ended with an error that clients take for what it is.

    Sessions are the orchestrator's: they outlive whatever else is killed, and end with it.
    """
    for event in [event for event in events if event["event"] == "refused"]:
        message = json.loads(event["body"])["error"]["message"]
        again = {CLOSED: "false", AWAY: "true", BUSY: "true"}
        assert message and event["retry"] == again.get(event["status"]), event
    rewarded = names_of(events, "rewarded")
    closed = names_of([event for event in events if event.get("status") == CLOSED], "refused")
    for daemon, names in at_kill.items():
        assert names <= (closed | rewarded if daemon == "run_a" else rewarded), daemon
    assert closed & at_kill["run_a"]


def check_batches(events: Sequence[dict[str, Any]], samples: Sequence[TrainingSample]) -> None:
    """Each session is in the batches once at most, with all that it was answered and its own reward."""
    answers: dict[float, list[list[int]]] = {}
    for event in events:
        if event["event"] == "answered":
            answers.setdefault(reward_of(event["name"]), []).append(event["token_ids"])
    trained: dict[float, list[list[int]]] = {}
    rollouts: dict[float, set[str]] = {}
    for number, sample in enumerate(samples):
        rollouts.setdefault(sample.reward, set()).add(sample.rollout_id or str(number))
        trained.setdefault(sample.reward, []).extend(turns_of(sample))
    assert rollouts and all(len(found) == 1 for found in rollouts.values())
    for reward, found in trained.items():
        assert sorted(found) == sorted(answers[reward]) and len(found) == NUM_TURNS, (found, answers[reward])


def turns_of(sample: TrainingSample) -> list[list[int]]:
    """The tokens of each answer that has a loss."""
    tokens = itertools.groupby(zip(sample.loss_mask, sample.token_ids, strict=True), key=lambda each: each[0])
    return [[token for _, token in group] for is_sampled, group in tokens if is_sampled]


def check_usage(workspace: Workspace, events: Sequence[dict[str, Any]]) -> None:
    """All that was trained on is counted once, and nothing is sampled that no client got but what a kill took."""
    (used,) = workspace.json("usage")["rows"]
    run = workspace.run_dir("run_a")
    newest = max(list_steps(run.broadcast, stable_only=True))
    trained = [sample for step in range(1, newest + 1) for sample in read_batch(run.rollout_file(step)).samples]
    assert used["tokens_trained"] == sum(len(sample.token_ids) for sample in trained) > 0
    num_answered = sum(len(event["token_ids"]) for event in events if event["event"] == "answered")
    assert 0 < used["tokens_sampled"] <= num_answered + NUM_USERS * MAX_TOKENS


def test_sessions_outlive_what_answers_them_and_nothing_counts_twice(workspace: Workspace, tmp_path: Path) -> None:
    run, at_kill = workspace.run_dir("run_a"), dict[str, set[str]]()

    def goes_on(what: str, app: Application, *, seen: int) -> None:
        step = max(list_rollout_steps(run), default=0)
        workspace.wait(lambda: app.num_done_since(seen) >= NUM_USERS, f"new sessions {what}")
        workspace.wait(lambda: max(list_rollout_steps(run), default=0) > step, f"a batch {what}")

    with application(workspace, tmp_path) as app:
        goes_on("at the beginning", app, seen=0)
        for daemon in ("gateway", "run_a", "inference"):
            workspace.wait(lambda daemon=daemon: pid_of(workspace, daemon) > 0, daemon)
            workspace.wait(lambda: len(app.in_work()) >= NUM_USERS // 5, "sessions in work")
            at_kill[daemon], killed = app.in_work(), pid_of(workspace, daemon)
            os.kill(killed, signal.SIGKILL)
            workspace.wait(
                lambda daemon=daemon, killed=killed: pid_of(workspace, daemon) not in (0, killed), f"another {daemon}"
            )
            workspace.wait(lambda daemon=daemon: not at_kill[daemon] & app.in_work(), "the sessions of before")
            goes_on(f"after {daemon} was killed", app, seen=len(app.events()))
        app.end()
        events = app.events()
    for daemon in ("gateway", "run_a", "inference"):
        found = read_status(workspace.paths.daemon_status(daemon), DaemonStatus)
        assert found is not None and found.num_restarts == 1, daemon
    workspace.prl("down")
    check_clients(events, at_kill)
    samples = [sample for step in list_rollout_steps(run) for sample in read_batch(run.rollout_file(step)).samples]
    check_batches(events, samples)
    check_usage(workspace, events)
