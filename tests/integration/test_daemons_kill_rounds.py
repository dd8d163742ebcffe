"""kill -9 of random daemons of the whole system under load: every run finishes, no batch is lost or doubled.

`PRL_KILL_ROUNDS` is the number of rounds, `PRL_KILL_SEED` their seed; both are printed.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from daemons.workspace import DaemonView
from daemons.workspace_reader import WorkspaceReader
from prime_rl.configs.validate import load_run_config
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import RunDir, list_rollout_steps, list_steps
from prime_rl.contract.types import read_batch
from prime_rl.orchestrator.envs import load_environment
from prime_rl.orchestrator.sampler import ExampleSampler
from prime_rl.utils.process import ProcessId
from tests.budgets import KILL_ROUNDS as NUM_ROUNDS
from tests.budgets import KILL_SEED as SEED
from tests.system_support import PATIENCE_S, Workspace, read_metrics

# A round waits until its victims are up again.
pytestmark = [pytest.mark.release, pytest.mark.timeout(1800 + 60 * NUM_ROUNDS)]

# Updates of each of the three runs: enough that there is work until the last round.
MAX_STEPS = 20 + 2 * NUM_ROUNDS
# Rounds between which the system need not get on: what restarts is killed again, and its neighbours with it.
ROUNDS_IN_A_ROW = 3
ENVS = {"run_a": "reverse-text", "run_b": "sort-letters", "run_c": "upper-case"}
SUPERVISOR_TOML = """
backoff_s = 0.2
max_backoff_s = 1.0
early_crash_s = 0.0
max_early_crashes = 20
# Who is killed when is drawn: the same run may be the one in work at several kills.
max_deaths_of_run = 1000
"""


class Rounds:
    """Kills daemons of one workspace, and records what it has seen."""

    def __init__(self, workspace: Workspace, rng: random.Random) -> None:
        self.workspace = workspace
        self.rng = rng
        self.kills: dict[str, int] = {}
        self.killed: set[int] = set()
        self.batches: dict[Path, int] = {}
        self._reader = WorkspaceReader(workspace.output_dir)

    def running(self) -> dict[str, DaemonView]:
        """Daemons that are up, by name; also the supervisor. What was killed already may still be shown as running."""
        daemons = self._reader.read().daemons
        return {each.name: each for each in daemons if each.state == "running" and each.pid not in (None, *self.killed)}

    def progress(self) -> int:
        """Batches written and versions published, of all runs."""
        runs = [self.workspace.run_dir(run_id) for run_id in ENVS]
        return sum(len(list_rollout_steps(run)) + len(list_steps(run.broadcast)) for run in runs)

    def all_finished(self) -> bool:
        runs = self._reader.read().runs
        assert not [run for run in runs if run.state in ("failed", "evicted", "invalid")], self.workspace.logs()
        return len(runs) == len(ENVS) and all(run.state == "finished" for run in runs)

    def play(self, number: int) -> None:
        """One round: wait until its victims are up (and every few rounds until the system got on), then kill them."""
        kind = self.rng.choice(["trainer", "inference", "orchestrator", "orchestrator", "supervisor", "two"])
        before = self.progress() if number % ROUNDS_IN_A_ROW == 1 else -1
        victims: list[DaemonView] = []

        def there() -> bool:
            victims[:] = self._victims(kind)
            return self.all_finished() or (bool(victims) and self.progress() > before)

        self.workspace.wait(there, f"round {number}: {kind} to be up, and progress beyond {before}")
        assert not self.all_finished(), f"all runs are finished before round {number}: give them more steps"
        time.sleep(self.rng.random() * 0.3)  # not a condition: a moment at random within what it does
        for victim in victims:
            self._kill(number, victim)
        self._note_batches()
        if kind == "supervisor":
            self.workspace.up()

    def _victims(self, kind: str) -> list[DaemonView]:
        up = self.running()
        orchestrators = [daemon for name, daemon in sorted(up.items()) if name in ENVS]
        if kind == "orchestrator":
            return [self.rng.choice(orchestrators)] if orchestrators else []
        if kind == "two":
            found = [up[name] for name in ("trainer", "inference") if name in up] + orchestrators
            return self.rng.sample(found, 2) if len(found) >= 2 else []
        return [up[kind]] if kind in up else []

    def _kill(self, number: int, victim: DaemonView) -> None:
        assert victim.pid is not None
        identity = ProcessId.of(victim.pid)
        identity.send(signal.SIGKILL)
        self.killed.add(victim.pid)
        wait_for(lambda: not identity.is_running(), f"{victim.name} to be gone", timeout_s=PATIENCE_S)
        name = "orchestrator" if victim.name in ENVS else victim.name
        self.kills[name] = self.kills.get(name, 0) + 1
        print(f"round {number}: kill -9 {victim.name} (pid {victim.pid}), progress {self.progress()}", flush=True)

    def _note_batches(self) -> None:
        """A batch that was seen must never be written again."""
        for run_id in ENVS:
            run = self.workspace.run_dir(run_id)
            for step in list_rollout_steps(run):
                path = run.rollout_file(step)
                written = path.stat().st_mtime_ns
                assert self.batches.setdefault(path, written) == written, f"{path} was written twice"


def expected_ids(run: RunDir, max_steps: int) -> list[str]:
    """The example of each sample, had nothing ever been killed."""
    config = load_run_config(run.orch_toml)
    sampler = ExampleSampler({env.label: load_environment(env, config.seed) for env in config.env}, config.seed)
    picks = [sampler.pick(index) for index in range(config.groups_per_batch * max_steps)]
    return [f"{pick.env_name}/{pick.example.id}" for pick in picks for _ in range(config.rollouts_per_example)]


def check_run(run: RunDir, max_steps: int, kills: Mapping[str, int]) -> None:
    """Every batch once, every update once."""
    steps = list(range(1, max_steps + 1))
    assert list_rollout_steps(run) == steps
    batches = [read_batch(run.rollout_file(step)) for step in steps]
    assert [sample.example_id for batch in batches for sample in batch.samples] == expected_ids(run, max_steps)
    assert list_steps(run.broadcast, stable_only=True)[-1] == max_steps
    progress = json.loads((run.trainer_checkpoint(max_steps) / "progress.json").read_text())
    assert (progress["step"], progress["total_samples"]) == (max_steps, sum(len(batch.samples) for batch in batches))
    for path, killed in (
        (run.trainer_metrics, kills.get("trainer", 0)),
        (run.orchestrator_metrics, kills.get("orchestrator", 0)),
    ):
        told = [line["step"] for line in read_metrics(path) if "reward/mean" in line or "loss" in line]
        assert told == sorted(set(told)) and set(told) <= set(steps), path
        assert len(told) >= max_steps - killed, f"{path}: a kill costs at most the line that was being written"


def test_random_kills_of_all_daemons_lose_nothing_and_double_nothing(workspace: Workspace) -> None:
    print(f"{NUM_ROUNDS} rounds, seed {SEED}")
    workspace.system_toml.write_text(workspace.system_toml.read_text() + SUPERVISOR_TOML)
    workspace.up()
    for seed, (run_id, env) in enumerate(ENVS.items()):
        source = workspace.write_run(run_id.removeprefix("run_"), max_steps=MAX_STEPS, env=env, seed=seed)
        source.write_text(source.read_text() + "keep_rollouts = true\n")  # in [ckpt], the last table
        workspace.prl("runs", "add", str(source))
    rounds = Rounds(workspace, random.Random(SEED))
    began = time.monotonic()
    for number in range(1, NUM_ROUNDS + 1):
        rounds.play(number)
    rounds_s = time.monotonic() - began
    workspace.wait(rounds.all_finished, "all runs to finish")
    print(f"kills {rounds.kills} in {rounds_s:.0f} s, all finished after {time.monotonic() - began:.0f} s")
    workspace.prl("down")  # a run has finished before the line of its last update is written
    rounds._note_batches()
    for run_id in ENVS:
        check_run(workspace.run_dir(run_id), MAX_STEPS, rounds.kills)
    assert workspace.processes() == []
