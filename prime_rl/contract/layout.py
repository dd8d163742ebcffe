"""The disk layout: every path and every marker, in one place.

All processes meet on disk, so this module is their interface. Nothing else in the project joins path pieces
below `output_dir`. It only computes and validates paths; reading and writing is done by `contract.files`.

    {output_dir}/
      run_<id>/
        control/     orch.toml  config_validation_error.txt  status.json
                     admitted.toml  apply.toml  added.txt  data.json
                     evicted.txt  paused.txt  preempted.txt  finished.txt  life.txt
        data/        files that the config names: data and rewards (only with `[[env]] id = "jsonl"`)
        init/        the adapter that the run starts from (only with [init])
        teacher/step_N/      the adapters that the run learns from, numbered
        checkpoints/step_N/  trainer/  orchestrator/  STABLE
        rollouts/step_N/     rollouts.msgpack
        broadcast/step_N/    adapter_model.safetensors  adapter_config.json  STABLE
                             (full fine-tune: model.safetensors  config.json  tokenizer files  STABLE)
        metrics/     trainer.jsonl  orchestrator.jsonl  samples.jsonl (the newest rollouts, for people)
                     ratios.jsonl (the trainer's log-ratio of each kept token)
        monitors/    tensorboard/  wandb/  state.json (only with a monitor)
        logs/        orchestrator.log
      trainer/status.json   inference/status.json   daemons/<name>.json   logs/<name>.log
      inference/<n>/        status.json (one an inference server; 0 writes inference/status.json too)
      gateway/status.json   gateway/secret (its owner's alone; only where a run has agents)
      trainer/work.json     inference/<n>/work.json (what is in work, and so what ended a daemon)
      daemons/starts/       <name>.<start>.<node>.json (one an agent)  <name>.<start>.stop
      usage/       <run_id>.jsonl, trainer.jsonl (what each run has used)
      sweeps/      <name>.json (the plan of one sweep)  decisions/<name>.json
      monitors/    trackio/ (all runs in one database; only with this monitor)
      cache/       what vLLM compiles (only where HOME cannot be written)
      multinode/   node_<rank>.json (one a node of a multi-node group)  group/group.json  iteration_N/
      .trash/

`step` counts optimizer updates done. `rollouts/step_N` (N from 1) feeds the N-th update, which makes policy version N,
published at `broadcast/step_N` and saved at `checkpoints/step_N`. Version 0 is the untouched adapter, or model; it is
published only where the run starts from `init/`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

# Replica 0 is found without a folder.
_REPLICA = re.compile(r"[1-9][0-9]{0,4}")


@dataclass(frozen=True)
class DaemonPaths:
    """The paths of daemons: status files, configs, starts, requests. `path` is the workspace."""

    path: Path

    @property
    def trainer_status(self) -> Path:
        """The trainer's slots, steps and waiting runs now; written by it alone."""
        return self.path / "trainer" / "status.json"

    @property
    def trainer_work(self) -> Path:
        """The file that the trainer reads now (`contract.notes`); written by it alone."""
        return self.path / "trainer" / "work.json"

    @property
    def pass_limit(self) -> Path:
        """The size of a pass that may fit, where a larger one ended a trainer of several ranks; written by it."""
        return self.path / "trainer" / "pass_limit.json"

    @property
    def inference(self) -> Path:
        """Status files of the inference servers."""
        return self.path / "inference"

    @property
    def caches(self) -> Path:
        """The place of what libraries keep between starts, where HOME cannot be written."""
        return self.path / "cache"

    @property
    def inference_status(self) -> Path:
        """Of the first inference server, replica 0."""
        return self.inference / "status.json"

    def replica_status(self, replica: int) -> Path:
        """Written by the inference server of that number only."""
        return self.inference / str(replica) / "status.json"

    def replica_work(self, replica: int) -> Path:
        """The work of that inference server now (`contract.notes`); written by it alone."""
        return self.inference / str(replica) / "work.json"

    def inference_statuses(self) -> dict[int, Path]:
        """The status file of each inference server that ever was, by its number, ascending; always that of replica 0.

        What replica 0 writes to both of its files is read from `inference_status`, which any engine may write.
        """
        others = sorted(int(path.name) for path in self.inference.glob("*") if _REPLICA.fullmatch(path.name))
        return {0: self.inference_status} | {number: self.replica_status(number) for number in others}

    @property
    def gateway_status(self) -> Path:
        """Where agents and orchestrators find the gateway, and how many; written by it alone."""
        return self.path / "gateway" / "status.json"

    @property
    def gateway_secret(self) -> Path:
        """The secret of which all keys of sessions and runs are made; for its owner only."""
        return self.path / "gateway" / "secret"

    @property
    def weights_lock(self) -> Path:
        """Held by the orchestrator whose run's whole weights the inference servers have."""
        return self.inference / "weights.lock"

    @property
    def daemons(self) -> Path:
        """Records of the supervisor about each daemon, and requests to it."""
        return self.path / "daemons"

    def daemon_status(self, name: str) -> Path:
        """State, process and restarts of one daemon; written by the supervisor alone."""
        return self.daemons / f"{name}.json"

    def own_status(self, name: str) -> Path:
        """Written by a daemon that has no other place for its status: alerts, monitors."""
        return self.daemons / name / "status.json"

    @property
    def monitor_ids(self) -> Path:
        """The ids of runs at W&B and trackio, deleted ones too; written by the daemon `monitors` alone."""
        return self.daemons / "monitors" / "ids.json"

    @property
    def alerts_open(self) -> Path:
        """The incidents that the daemon `alerts` reports now, written by it alone."""
        return self.daemons / "alerts" / "open.json"

    @property
    def alerts_said(self) -> Path:
        """The acknowledged and muted alerts. One file each, written by `prl` and `prl-tui`."""
        return self.daemons / "alerts" / "said"

    def alert_said(self, name: str) -> Path:
        """One acknowledgement, or one mute."""
        return self.alerts_said / f"{name}.json"

    @property
    def starts(self) -> Path:
        """Records of agents about daemons that they started on other machines, and requests to them."""
        return self.daemons / "starts"

    def agent_record(self, name: str, start_id: str, node: int) -> Path:
        """Written by the agent of that node only."""
        return self.starts / f"{name}.{start_id}.{node}.json"

    def stop_request(self, name: str, start_id: str) -> Path:
        """Asks the agents of one start to end their daemon; holds the grace in seconds."""
        return self.starts / f"{name}.{start_id}.stop"

    @property
    def supervisor_lock(self) -> Path:
        """Held by the living supervisor: there is one for each workspace."""
        return self.daemons / "supervisor.lock"

    @property
    def supervisor_pidfile(self) -> Path:
        """The process that is the supervisor; for people, never proof."""
        return self.daemons / "supervisor.pid"

    def start_request(self, name: str) -> Path:
        """Requests the restart of a daemon; the supervisor removes it when it has read it."""
        return self.daemons / "requests" / name

    def component_config(self, name: str) -> Path:
        """The resolved config that the supervisor hands to a daemon."""
        return self.daemons / "configs" / f"{name}.toml"


RUN_PREFIX = "run_"
# What a run folder holds; `configs` is an older place of the config.
RUN_FOLDERS = (
    *("control", "configs", "data", "init", "teacher", "checkpoints", "rollouts", "broadcast", "metrics", "monitors"),
    "logs",
)
STABLE = "STABLE"
# Of a folder of steps; a run that keeps every one of so many is better thinned out.
MAX_ENTRIES = 50_000
# How `config_validation_error.txt` begins.
CONFIG_ERROR_PREFIX = "Error parsing orchestrator config"
# 1 to 64 characters after the prefix: short enough for any file system, and free of separators and shell characters.
_RUN_ID = re.compile(r"run_[A-Za-z0-9._-]{1,64}")
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME_CHARS = 100  # of a file in data/
# What a run's copy has as JSON lines: a data set of the hub, and a file that ends so.
HUB, PARQUET = "hub:", ".parquet"
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,9})")
_ITERATION = re.compile(r"iteration_([1-9][0-9]{0,9})")
_NODE = re.compile(r"node_(0|[1-9][0-9]{0,4})\.json")


class TooManySteps(OSError):
    """A folder of a run has more steps than can be looked through at each look. `str()` is a sentence with the path."""


class LayoutError(ValueError):
    """An invalid run id or path. The message has the value and what is allowed."""


def check_run_id(run_id: str) -> str:
    """Return `run_id` when it is one, else raise LayoutError."""
    if not _RUN_ID.fullmatch(run_id):
        raise LayoutError(_bad_id(run_id))
    return run_id


def _bad_id(run_id: str) -> str:
    hint = f"; did you mean 'run_{run_id}'?" if _RUN_ID.fullmatch(RUN_PREFIX + run_id) else ""
    return f"invalid run id {run_id!r}: must be 'run_' followed by 1 to 64 letters, digits, '.', '_' or '-'{hint}"


def step_name(step: int) -> str:
    """12 -> `step_12`, the name of that step's folders."""
    return f"step_{step}"


def parse_step(name: str) -> int | None:
    """`step_12` -> 12; anything else (also `step_012`) -> None."""
    return int(match[1]) if (match := _STEP.fullmatch(name)) else None


@dataclass(frozen=True, order=True, slots=True)
class RunDir:
    """The paths of one run. `path` is `{output_dir}/run_<id>`."""

    path: Path

    @property
    def run_id(self) -> str:
        """The folder's name, `run_<id>`."""
        return self.path.name

    @property
    def control(self) -> Path:
        """The run's config, and marks that people and the trainer set."""
        return self.path / "control"

    @property
    def orch_toml(self) -> Path:
        """The config asked for; the older `orch.toml` of the folder configs when only that one exists. Never raises."""
        current = self.control / "orch.toml"
        older = self.path / "configs" / "orch.toml"
        return older if not os.path.exists(current) and os.path.exists(older) else current

    @property
    def admitted(self) -> Path:
        """The config that the run trains with, since when and from which step; written by the trainer alone."""
        return self.control / "admitted.toml"

    @property
    def applied(self) -> Path:
        """The config to admit next, by `prl runs apply`, `set` or `rollback`; removed by the trainer that admits it."""
        return self.control / "apply.toml"

    @property
    def added(self) -> Path:
        """The run's id and when it was added; written once, by what adds it, else by the trainer that sees it first."""
        return self.control / "added.txt"

    @property
    def data_digests(self) -> Path:
        """The SHA-256 of each file of `data/`, by its name in the config; written once, by what adds the run."""
        return self.control / "data.json"

    @property
    def config_error(self) -> Path:
        """Why `orch.toml` is refused; written by the trainer, removed by it when the file is corrected."""
        return self.control / "config_validation_error.txt"

    @property
    def evicted(self) -> Path:
        """Why the run lost its slot; its trainer, `prl` and `prl-tui` write it, `prl runs readmit` removes it."""
        return self.control / "evicted.txt"

    @property
    def paused(self) -> Path:
        """Written by a person's pause; the run leaves its slot until the file is removed."""
        return self.control / "paused.txt"

    @property
    def preempted(self) -> Path:
        """Written by the trainer when a more urgent run takes the slot, and removed by it when the run is back."""
        return self.control / "preempted.txt"

    @property
    def finished(self) -> Path:
        """Why the run ends before `max_steps`: its budget, its stop rule, a sweep. It ends after a checkpoint."""
        return self.control / "finished.txt"

    @property
    def served(self) -> Path:
        """The version of a run that does not train which `prl serve` keeps at inference; written by it alone."""
        return self.control / "served.txt"

    @property
    def life(self) -> Path:
        """A random name, by which usage and monitors distinguish this run from an earlier one of the same id."""
        return self.control / "life.txt"

    @property
    def data(self) -> Path:
        """Copies of the files that the run's config names."""
        return self.path / "data"

    @property
    def init(self) -> Path:
        """The adapter that the run starts from, with the moments of its optimizer or without."""
        return self.path / "init"

    @property
    def teachers(self) -> Path:
        """The adapters that the run learns from."""
        return self.path / "teacher"

    def teacher_dir(self, number: int) -> Path:
        """One of the adapters that the run learns from, in PEFT format."""
        return self.teachers / step_name(number)

    def teacher_source(self, number: int) -> Path:
        """The name in the config of the adapter that was copied."""
        return self.teacher_dir(number) / "source.txt"

    @property
    def status(self) -> Path:
        """The status of the run's orchestrator; written by it alone."""
        return self.control / "status.json"

    @property
    def resumed(self) -> Path:
        """Written by the trainer: which explicit `ckpt.resume_step` request has already been carried out."""
        return self.control / "resumed.json"

    @property
    def checkpoints(self) -> Path:
        """The states from which training continues, one folder a saved step."""
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        """Batches, one folder an update, until a checkpoint covers them."""
        return self.path / "rollouts"

    @property
    def broadcast(self) -> Path:
        """Published policy versions, one folder a version, the newest few."""
        return self.path / "broadcast"

    @property
    def metrics(self) -> Path:
        """One line of JSON a step, one file a writer: docs/metrics.md."""
        return self.path / "metrics"

    @property
    def trainer_metrics(self) -> Path:
        """Figures of each update; written by the trainer."""
        return self.metrics / "trainer.jsonl"

    @property
    def orchestrator_metrics(self) -> Path:
        """Figures of each batch and each evaluation; written by the orchestrator."""
        return self.metrics / "orchestrator.jsonl"

    @property
    def samples(self) -> Path:
        """Some of the newest rollouts as text, for people (`contract.samples`). Nothing depends on it."""
        return self.metrics / "samples.jsonl"

    @property
    def ratios(self) -> Path:
        """The trainer's log-ratio of each token of the kept rollouts (`contract.samples`), for people."""
        return self.metrics / "ratios.jsonl"

    @property
    def monitors(self) -> Path:
        """The files of the run's monitors; prl does not read them."""
        return self.path / "monitors"

    @property
    def log(self) -> Path:
        """Output of the run's orchestrator: `prl logs ID`."""
        return self.path / "logs" / "orchestrator.log"

    def data_file(self, named: str) -> Path:
        """The run's copy of the file that its config names `named`: `../sums/train.jsonl` is `sums-train.jsonl`."""
        named += ".jsonl" if named.startswith(HUB) or named.endswith(PARQUET) else ""
        return self.data / (_NOT_IN_NAME.sub("-", named).strip("-.")[-_MAX_NAME_CHARS:] or "file")

    def checkpoint_dir(self, step: int) -> Path:
        """One checkpoint; complete when `STABLE` is in it."""
        return self.checkpoints / step_name(step)

    def trainer_checkpoint(self, step: int) -> Path:
        """Adapter, moments of the optimizer, random state, progress; written by the trainer."""
        return self.checkpoint_dir(step) / "trainer"

    def orchestrator_checkpoint(self, step: int) -> Path:
        """The position in the example order; written by the orchestrator."""
        return self.checkpoint_dir(step) / "orchestrator"

    def rollout_dir(self, step: int) -> Path:
        """The batch of update N."""
        return self.rollouts / step_name(step)

    def rollout_file(self, step: int) -> Path:
        """The samples of update N (`contract.types`); written by the orchestrator."""
        return self.rollout_dir(step) / "rollouts.msgpack"

    def broadcast_dir(self, step: int) -> Path:
        """Policy version N: an adapter in PEFT format, or a whole model; complete with `STABLE`. By the trainer."""
        return self.broadcast / step_name(step)


def stable_marker(step_dir: Path) -> Path:
    """The empty file that marks a folder as complete. Always written last."""
    return step_dir / STABLE


def list_steps(parent: Path, *, stable_only: bool = False) -> list[int]:
    """Step numbers of the real `step_N` folders in `parent`, ascending; [] when `parent` is not a real folder.

    Raises TooManySteps for more than MAX_ENTRIES: each takes time of who looks, and links cost a run nothing.
    """
    if os.path.islink(parent):
        return []
    try:
        with os.scandir(parent) as found:
            entries = list(islice(found, MAX_ENTRIES + 1))
    except (FileNotFoundError, NotADirectoryError):
        return []
    if len(entries) > MAX_ENTRIES:
        raise TooManySteps(f"{parent} has more than {MAX_ENTRIES} entries: remove the oldest")
    steps = sorted(step for e in entries if not e.is_symlink() and (step := parse_step(e.name)) is not None)
    return [s for s in steps if os.path.exists(stable_marker(parent / step_name(s)))] if stable_only else steps


def list_rollout_steps(run: RunDir) -> list[int]:
    """Steps whose rollout file is complete, ascending."""
    return [step for step in list_steps(run.rollouts) if os.path.exists(run.rollout_file(step))]


@dataclass(frozen=True)
class OutputDir(DaemonPaths):
    """The paths of one workspace of tenants."""

    def run(self, run_id: str) -> RunDir:
        """Paths of `run_id`. Raises LayoutError for an invalid id, or a folder that is a link or leads outside."""
        run = RunDir(self.path / check_run_id(run_id))
        if reason := refusal(self.path, run.path):
            raise LayoutError(reason)
        return run

    @property
    def usage(self) -> Path:
        """The usage of each run, deleted ones too: `prl usage`."""
        return self.path / "usage"

    def run_usage(self, run_id: str) -> Path:
        """The usage of a run, as its orchestrator counts it, or for "trainer" the trainer. It outlives the run."""
        return self.usage / f"{run_id}.jsonl"

    def sweep(self, name: str) -> Path:
        """The plan of a sweep (`contract.sweeps`)."""
        return self.path / "sweeps" / f"{name}.json"

    def sweep_decisions(self, name: str) -> Path:
        """The decisions of successive halving about the sweep, rung by rung; written by the supervisor."""
        return self.path / "sweeps" / "decisions" / f"{name}.json"

    @property
    def evaluations(self) -> Path:
        """What `prl eval` evaluated, one folder each: the job, and every rollout in `samples.jsonl`."""
        return self.path / "evaluations"

    @property
    def trackio(self) -> Path:
        """The data of the monitor trackio, of all runs, deleted ones too; prl does not read it."""
        return self.path / "monitors" / "trackio"

    @property
    def logs(self) -> Path:
        """Logs of the daemons, and who did what."""
        return self.path / "logs"

    def log(self, name: str) -> Path:
        """Output of one daemon: `prl logs NAME`."""
        return self.logs / f"{name}.log"

    @property
    def audit(self) -> Path:
        """Every action on a run, of a person or a daemon: time, who, action, run, reason."""
        return self.logs / "audit.jsonl"

    @property
    def multinode(self) -> Path:
        """Records of the nodes of a group: docs/multinode.md."""
        return self.path / "multinode"

    def node_status(self, rank: int) -> Path:
        """Written by the node of that rank only."""
        return self.multinode / f"node_{rank}.json"

    @property
    def group_status(self) -> Path:
        """Written by the master of a multi-node group only, in its own folder, which all others watch."""
        return self.multinode / "group" / "group.json"

    def iteration(self, iteration: int) -> IterationDir:
        """One iteration of a multi-node group."""
        return IterationDir(self.multinode / f"iteration_{iteration}")

    def list_iterations(self) -> list[int]:
        """The iterations of a multi-node group that have a folder, ascending."""
        return self._numbers(_ITERATION)

    def list_nodes(self) -> list[int]:
        """The ranks that have a status file, ascending; [] without a group."""
        return self._numbers(_NODE)

    def _numbers(self, pattern: re.Pattern[str]) -> list[int]:
        return sorted(int(match[1]) for path in self.multinode.glob("*") if (match := pattern.fullmatch(path.name)))

    @property
    def trash(self) -> Path:
        """Deleted runs, until `prl runs purge`."""
        return self.path / ".trash"

    def trashed(self, run_id: str, stamp: str) -> Path:
        """A deleted run with the time of its deletion, `stamp` (no dots in it)."""
        return self.trash / f"{run_id}.{stamp}"


def refusal(output_dir: Path, run_path: Path) -> str | None:
    """Why a `run_*` entry may not be used, or None. Links are refused, so no run can reach outside its workspace."""
    if run_path.is_symlink():
        return f"{run_path} is a symbolic link: a run must be a real folder; move the folder itself into {output_dir}"
    if run_path.exists():
        if not run_path.is_dir():
            return f"{run_path} is not a folder: a run must be one"
        if (run_path / "control").is_symlink():
            return f"{run_path / 'control'} is a symbolic link: control/ must be a real folder"
        if run_path.resolve().parent != output_dir.resolve():
            return f"{run_path} leads outside {output_dir}: a run must lie directly in it"
    return None


@dataclass(frozen=True)
class RefusedRun:
    """A `run_*` entry that was seen and refused."""

    name: str
    reason: str


def scan_runs(output_dir: Path) -> tuple[list[RunDir], list[RefusedRun]]:
    """All `run_*` entries of `output_dir`, by name: the runs, and what was refused with the reason."""
    runs: list[RunDir] = []
    refused: list[RefusedRun] = []
    for entry in _entries(output_dir):
        path = output_dir / entry.name
        if not _RUN_ID.fullmatch(entry.name):
            refused.append(RefusedRun(entry.name, _bad_id(entry.name)))
            continue
        # Only a link needs the costly part of `refusal`.
        is_plain = entry.is_dir(follow_symlinks=False) and not os.path.islink(os.path.join(entry.path, "control"))
        if not is_plain and (reason := refusal(output_dir, path)):
            refused.append(RefusedRun(entry.name, reason))
        else:
            runs.append(RunDir(path))
    return runs, refused


def _entries(output_dir: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(output_dir) as entries:
            return sorted((e for e in entries if e.name.startswith(RUN_PREFIX)), key=lambda entry: entry.name)
    except FileNotFoundError:
        return []


@dataclass(frozen=True)
class IterationDir:
    """The files of one iteration of a multi-node group: `multinode/iteration_N/`. `split` is "train" or "eval"."""

    path: Path

    def plan(self, split: str, epoch: str, round: int) -> Path:
        """The tasks of each rank in one round of one epoch; written by the master."""
        return self.path / f"{split}_plan_{epoch}_{round}.json"

    def plans(self, split: str, epoch: str) -> list[Path]:
        """Those of all rounds of one epoch, the last round last."""
        found = self.path.glob(f"{split}_plan_{epoch}_*.json")
        return sorted(found, key=lambda path: int(path.stem.rpartition("_")[2]))

    def rank_file(self, split: str, rank: int, version: int, key: str, incarnation: str) -> Path:
        """The results of one process of one rank with one policy version. `key` identifies their settings."""
        return self.path / f"{split}_rank_{rank}_v{version}_{key}_{incarnation}.msgpack"

    def rank_files(self, split: str, *, rank: int | str = "*", version: int | str = "*", key: str = "*") -> list[Path]:
        """Those of all processes of a rank, with a version and with settings; or of any."""
        return sorted(self.path.glob(f"{split}_rank_{rank}_v{version}_{key}_*.msgpack"))

    def request(self, what: str, rank: int) -> Path:
        """A node's request to its own rollout worker."""
        return self.path / f"{what}_request_{rank}.json"

    def proof(self, name: str) -> Path:
        """The proof that a phase is done: train, eval, update, checkpoint, done. Written by the master, last of all."""
        return self.path / f"{name}.json"
