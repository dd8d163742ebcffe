"""Where a node works now: the iteration's folder, its updates, its policy version; and this node's own processes.

Shared by the work of rollouts and of updates (`work`). `Proofs` has what is proven of each iteration by the
files that the master wrote, and where a new epoch goes on by them. A proof that no longer holds (rollouts with other
settings, of a policy that has been trained since, or in a file that is damaged; an evaluation that was not due and is
now) counts as none, and is made again.

A piece of a phase's work that takes time is a `Task`: looked at now and then, given up at any moment. Most are of this
node's own processes: rollout workers, its inference server, its rank of the trainer. Each has a keeper and a log.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import tomli_w

from prime_rl.configs.admitted import request
from prime_rl.configs.multinode import RUN_ID, MultinodeConfig
from prime_rl.contract.files import make_folder, open_append, open_file, read_json, read_text, write_atomic
from prime_rl.contract.layout import IterationDir, OutputDir, list_steps
from prime_rl.contract.status import InferenceStatus, read_status
from prime_rl.contract.types import JoinRequest, MakeRequest, Split, read_rank_file
from prime_rl.multinode.decide import MASTER_RANK
from prime_rl.multinode.member import Report
from prime_rl.multinode.records import GroupRecord, Phase, Position, RlPhase, eval_is_due, first_position

TAIL_BYTES = 4_000
NUM_TAIL_LINES = 5

logger = logging.getLogger("node")


class Nothing:
    """In the place of a process where there is nothing to do: it has ended well before it began."""

    exit_code = 0

    def failure(self) -> str | None:
        """None: nothing can fail."""
        return None

    def ask_to_end(self) -> None:
        """Nothing runs."""


class Child:
    """One process under a keeper. Its output goes to `log`; `environment` is added to this node's."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self._is_asked = False
        make_folder(log.parent)
        logger.debug("starts %s (%s): %s", name, log, shlex.join(argv))
        with open_append(log) as output:
            output.write(f"$ {shlex.join(argv)}\n".encode())
            output.flush()
            self._start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prime_rl.utils.process", *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            )

    @property
    def exit_code(self) -> int | None:
        """The exit code of the command, 128 + N after signal N; None while it or its keeper runs."""
        if self._process.returncode is None and self._process.poll() is not None:
            logger.debug("%s ended with code %d", self.name, self._process.returncode)
        return self._process.returncode

    def failure(self) -> str | None:
        """Why it failed, with its last lines; None while it runs or when it ended well."""
        code = self.exit_code
        if code in (None, 0):
            return None
        with os.fdopen(open_file(self.log), "rb") as file:
            file.seek(max(self._start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).decode(errors="replace").splitlines()[-NUM_TAIL_LINES:]
        return f"{self.name} ended with code {code} ({self.log}): {' | '.join(lines)}"

    def ask_to_end(self) -> None:
        """It and everything below it: the keeper sees to that. Returns at once; once is enough."""
        if not self._is_asked and self.exit_code is None:
            self._process.send_signal(signal.SIGTERM)
        self._is_asked = True


SERVER = "this node's inference server to serve"


class Task(Protocol):
    """Some work under way, in the node's thread for work. It may read and copy, and never waits for a process."""

    def look(self) -> Report:
        """Go on with the work, and report how far it is."""

    def give_up(self) -> None:
        """Ask what is under way to end."""

    @property
    def has_ended(self) -> bool:
        """True when all of it has ended."""


class Now:
    """Work that is tried at every look until it returns that it is done. It must be safe to try again.

    `waiting_on` names what is missing while it is not, `needs` why that will never be there.
    """

    def __init__(
        self,
        attempt: Callable[[], bool],
        waiting_on: str | None = None,
        needs: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._attempt = attempt
        self._waiting_on = waiting_on
        self._needs = needs

    def look(self) -> Report:
        """Make one attempt."""
        return Report(done=self._attempt(), error=self._needs(), waiting_on=self._waiting_on)

    def give_up(self) -> None:
        """Nothing goes on between two looks."""

    @property
    def has_ended(self) -> bool:
        """Always True: nothing goes on between two looks."""
        return True


class Process:
    """Work of one process, begun as soon as `start` has what it needs (before that it gives None).

    Args:
        waiting_on: what it needs to begin.
        needs: why that will never be there, or None.
        measure: grows as the work goes on.
        finish: what is left to see once the process has ended well; tried until true.
        is_shared: other nodes work on the same, so its failure may be theirs.
    """

    def __init__(
        self,
        start: Callable[[], Child | Nothing | None],
        *,
        waiting_on: str | None = None,
        needs: Callable[[], str | None] = lambda: None,
        measure: Callable[[], int] = lambda: 0,
        finish: Callable[[], bool] = lambda: True,
        is_shared: bool = False,
    ) -> None:
        self._start = start
        self._waiting_on = waiting_on
        self._needs = needs
        self._measure = measure
        self._finish = finish
        self._is_shared = is_shared
        self._child: Child | Nothing | None = None
        self._failure: str | None = None

    def look(self) -> Report:
        """Start the process if it can begin, and report its progress, its failure or its end."""
        if self._child is None:
            self._child = self._start()
        progress = self._measure()
        if self._child is None:
            return Report(progress, error=self._needs(), waiting_on=self._waiting_on)
        if self._child.exit_code is None:
            return Report(progress)
        self._failure = self._failure or self._child.failure()
        if self._failure is not None:
            return Report(progress, error=self._failure, is_shared=self._is_shared)
        return Report(progress, done=self._finish())

    def give_up(self) -> None:
        """Ask the process to end; one that has not begun never does."""
        self._start = lambda: None
        if self._child is not None:
            self._child.ask_to_end()

    @property
    def has_ended(self) -> bool:
        """True when the process has ended, or never began."""
        return self._child is None or self._child.exit_code is not None


class InferenceServer:
    """This node's server and its status file. `url` is None until it serves."""

    def __init__(self, start: Callable[[], Child], status_file: Path) -> None:
        self._start = start
        self._status_file = status_file
        self._child: Child | None = None

    @property
    def url(self) -> str | None:
        """The server's base URL; None while its process does not run or its status is not `serving`."""
        status = read_status(self._status_file, InferenceStatus)
        is_ours = self._child is not None and self._child.exit_code is None
        return status.base_url if is_ours and status is not None and status.state == "serving" else None

    def start(self) -> None:
        """Start the server unless it runs; the status file of an earlier one is removed."""
        if self.has_ended:
            self._status_file.unlink(missing_ok=True)
            self._child = self._start()

    def failure(self) -> str | None:
        """Why it does not serve and never will."""
        if self._child is None or self._child.exit_code is None:
            return None
        return self._child.failure() or f"{self._child.name} ended with code 0 ({self._child.log})"

    def give_up(self) -> None:
        """Ask the server to end."""
        if self._child is not None:
            self._child.ask_to_end()

    @property
    def has_ended(self) -> bool:
        """True when the server has ended, or was never started."""
        return self._child is None or self._child.exit_code is not None


def size(path: Path) -> int:
    """In bytes, as a measure of progress; 0 when it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


# A proof names every task of an iteration and its file: a million of them.
MAX_PROOF_BYTES = 256 << 20


class TrainProof(msgspec.Struct, frozen=True, kw_only=True):
    """All rollouts of an iteration.

    The policy version and the settings (`Proofs.key`) that made them, and the name of each task's file.
    """

    policy_version: int
    key: str
    sources: dict[str, str]


class EvalProof(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of a policy version (`steps` has that one), or that none was due."""

    steps: list[int] = []
    due: bool = True


class _UpdateProof(msgspec.Struct, frozen=True):
    """The part that is read again of the proof of made batches (`contract.types.JoinResult`)."""

    sampler_state: dict[str, Any] = {}


class Proofs:
    """The proofs of one workspace as a group of this mode sees them.

    `splits`: the rollouts that it makes; `key` identifies their settings (`MultinodeConfig.rollouts_key`).
    """

    def __init__(
        self,
        output: OutputDir,
        rl_phase: RlPhase,
        splits: frozenset[Split],
        eval_interval: int | None,
        updates_per_iteration: int,
        key: str,
    ) -> None:
        self._output = output
        self._rl_phase = rl_phase
        self._splits = splits
        self._eval_interval = eval_interval
        self._updates = updates_per_iteration
        self.key = key
        self._whole: set[int] = set()

    def version(self, iteration: int) -> int:
        """The policy version that makes an iteration's rollouts. Without training it stays the newest version."""
        wanted = (iteration - 1) * self._updates
        if self._rl_phase is not RlPhase.ROLLOUT:
            return wanted
        return min(wanted, max(list_steps(self._output.run(RUN_ID).broadcast, stable_only=True), default=0))

    def sampler_state(self, version: int) -> dict[str, Any]:
        """The knowledge of the examples after the rollouts of version `version`; it decides what is drawn next.

        Raises OSError while the proof that holds it is not there to be read.
        """
        iteration = version // self._updates
        if iteration == 0:
            return {}
        path = self._output.iteration(iteration).proof("update")
        proof = read_json(path, _UpdateProof, limit=MAX_PROOF_BYTES)
        if proof is None:
            problem = f"{path}: not found or damaged: the next examples depend on it"
            raise OSError(f"{problem}: put it back, or start over in an empty --log-path")
        return proof.sampler_state

    def eval_is_due(self, iteration: int) -> bool:
        """True when this group makes evaluations and the iteration has one."""
        return "eval" in self._splits and eval_is_due(iteration, self._eval_interval)

    def train(self, iteration: int) -> TrainProof | None:
        """The rollouts that are there, of whatever version and settings."""
        return read_json(self._output.iteration(iteration).proof("train"), TrainProof, limit=MAX_PROOF_BYTES)

    def lost_task(self, iteration: int, proof: TrainProof) -> str | None:
        """A task of the rollouts that are proven, but no longer in its file, which is damaged or gone."""
        if iteration in self._whole:
            return None
        folder = self._output.iteration(iteration).path
        found = {(entry.task, name) for name in set(proof.sources.values()) for entry in read_rank_file(folder / name)}
        for task, name in proof.sources.items():
            if (task, name) not in found:
                return f"task {task} in {folder / name}"
        self._whole.add(iteration)  # looked at once: they are only ever added to
        return None

    def holds(self, name: str, iteration: int) -> bool:
        """True when an iteration's proof of that name exists with the expected content."""
        path = self._output.iteration(iteration).proof(name)
        if name == "train":
            proof = self.train(iteration)
            if proof is None or (proof.policy_version, proof.key) != (self.version(iteration), self.key):
                return False
            return self.lost_task(iteration, proof) is None
        if name == "eval" and path.exists() and self.eval_is_due(iteration):
            found = read_json(path, EvalProof, limit=MAX_PROOF_BYTES)
            return found is not None and found.due and found.steps == [self.version(iteration)]
        return path.exists()

    def resume(self) -> Position:
        """The first position that is not proven to be done."""
        iteration = 1
        while self.holds("done", iteration) or (self._rl_phase is RlPhase.ROLLOUT and self._is_rolled_out(iteration)):
            iteration += 1
        opening = first_position(self._rl_phase, iteration)
        return max(Position(iteration, self._phase(iteration)), opening)

    def _is_rolled_out(self, iteration: int) -> bool:
        return self.holds("eval", iteration) and ("train" not in self._splits or self.holds("train", iteration))

    def _phase(self, iteration: int) -> Phase:
        """Where an iteration that is not done goes on."""
        if self.holds("checkpoint", iteration):
            return Phase.RESTART_INFERENCE
        if self.holds("update", iteration):
            return Phase.CONFIG_READY
        if "train" in self._splits and not self.holds("train", iteration):
            return Phase.START
        return Phase.STOP_INFERENCE if self.holds("eval", iteration) else Phase.EVAL_ROLLOUT


@dataclass(frozen=True)
class WorkSetting:
    """The settings that one node's work needs beside the config.

    Attributes:
        address: this node's, as the others reach it.
        master: the master's, once it is known.
        weights: of all ranks.
        splits: which rollouts are made.
        max_iterations: None: endless.
        num_ranks: of the trainer on this node.
    """

    rank: int
    incarnation: str
    rl_phase: RlPhase
    weights: tuple[float, ...]
    address: str
    master: Callable[[], str | None]
    eval_interval: int | None
    splits: frozenset[Split]
    max_iterations: int | None
    num_ranks: int = 1


class Place:
    """One node's; `move` takes it to where the group is."""

    def __init__(self, setting: WorkSetting, config: MultinodeConfig, output: OutputDir) -> None:
        self.setting = setting
        self.config = config
        self.output = output
        self.run = output.run(RUN_ID)
        self.proofs = Proofs(
            output,
            setting.rl_phase,
            setting.splits,
            setting.eval_interval,
            config.updates_per_iteration,
            config.rollouts_key(),
        )
        self.position = Position(0, Phase.START)
        self._children: list[Child] = []
        self._is_closed = False
        self._lock = threading.Lock()
        self._group: GroupRecord | None = None

    def move(self, position: Position, group: GroupRecord) -> None:
        """Take over position and record of the group."""
        self.position, self._group = position, group

    @property
    def group(self) -> GroupRecord:
        """The record of the group at the last `move`."""
        assert self._group is not None, "no work before there is a group"
        return self._group

    @property
    def is_master(self) -> bool:
        """True when this node leads the group."""
        return self.setting.rank == MASTER_RANK

    @property
    def iteration(self) -> IterationDir:
        """The folder of the iteration that the node works in."""
        return self.output.iteration(self.position.iteration)

    @property
    def steps(self) -> list[int]:
        """The steps of this iteration's updates, ascending."""
        count = self.config.updates_per_iteration
        return [(self.position.iteration - 1) * count + number for number in range(1, count + 1)]

    def is_proven(self, name: str) -> bool:
        """True when this iteration's proof of that name holds (`Proofs.holds`)."""
        return self.proofs.holds(name, self.position.iteration)

    def prove(self, name: str, content: Mapping[str, object]) -> bool:
        """Write the proof unless it holds already. Always returns True, for `Now`. Raises OSError."""
        if not self.is_proven(name):
            write_atomic(self.iteration.proof(name), msgspec.json.encode(content))
        return True

    def write_run(self) -> None:
        """The ordinary run that all this trains."""
        text = tomli_w.dumps(self.config.orchestrator(self.setting.max_iterations))
        run = self.run
        run.path.mkdir(parents=True, exist_ok=True)
        for folder in (run.control, run.rollouts, run.broadcast, run.checkpoints, run.metrics):
            make_folder(folder)
        if read_text(run.orch_toml) != text:
            request(run, text)

    # -- this node's processes ----

    def child(self, name: str, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
        """Raises ValueError after `close`."""
        with self._lock:
            if self._is_closed:
                raise ValueError(f"this node leaves: {name} is not started")
            child = Child(name, argv, self.output.log(f"node_{self.setting.rank}_{name}"), environment or {})
            self._children = [*(each for each in self._children if each.exit_code is None), child]
        return child

    def close(self) -> None:
        """Ask all of them to end. From any thread."""
        with self._lock:
            self._is_closed = True
            for child in self._children:
                child.ask_to_end()

    @property
    def has_ended(self) -> bool:
        """True when all of this node's processes have ended."""
        return all(child.exit_code is not None for child in self._children)

    def make(self, split: Split, request: MakeRequest) -> Child:
        """Start the process that makes the rollouts of `request`, which is written to a file for it."""
        return self._share("make", split, request)

    def join(
        self,
        split: Split,
        sources: Mapping[str, str],
        steps: list[int],
        proof: str,
        sampler_state: dict[str, Any] | None = None,
    ) -> Child:
        """Put all tasks together, each from the file of this iteration that has its name; writes the proof."""
        request = JoinRequest(
            run=str(self.run.path),
            split=split,
            sources={task: str(self.iteration.path / name) for task, name in sources.items()},
            steps=steps,
            result=str(self.iteration.proof(proof)),
            sampler_state=sampler_state or {},
        )
        return self._share("join", split, request)

    def _share(self, what: str, split: Split, request: MakeRequest | JoinRequest) -> Child:
        path = self.iteration.request(f"{split}_{what}", self.setting.rank)
        write_atomic(path, msgspec.json.encode(request))
        return self.child(f"{split}_{what}", [sys.executable, "-m", "prime_rl.orchestrator.share", what, str(path)])
