"""One node of a multi-node group: `prl multinode`, or `python -m prime_rl.multinode.node`. Parse, build, drive, end.

Master and workers run the same loop on the same files; rank 0 also leads. Exit codes: 0 done, 1 this node failed, 2
wrong usage or refused by the group, 75 a node died (start the same commands again), 130 interrupted. Every flag that is
missing, contradictory or out of range is one line.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import random
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_rl import __version__
from prime_rl.configs.base import ConfigError, FlagError, build, merge, read_argv
from prime_rl.configs.multinode import DEFAULT_TOML, MultinodeConfig, node_parser
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.types import Split
from prime_rl.multinode.decide import MASTER_RANK, Exit
from prime_rl.multinode.member import Member, Prober, ProbeServer
from prime_rl.multinode.place import WorkSetting
from prime_rl.multinode.records import (
    EXIT_REFUSED,
    RULES,
    DiskStore,
    GroupSetting,
    GroupState,
    NodeRecord,
    NodeState,
    RlPhase,
    phases_of,
)
from prime_rl.multinode.work import PhaseWork
from prime_rl.utils.process import StopFlag
from prime_rl.utils.runtime import complain, count_gpus, own_address, setup_logger
from prime_rl.utils.watch import Watcher

logger = logging.getLogger("node")

FIRST_PAUSE_S = 0.01
# Where no events come (NFS, Lustre, FUSE) a barrier takes about two of these.
MAX_PAUSE_S = 0.5
GROWTH = 1.6
SAY_AGAIN_S = 1.0


def drive(member: Member, watcher: Watcher, stop: StopFlag, *, say: Callable[[str], None] = logger.info) -> Exit:
    """Tick until the member's exit. A signal makes it leave, which ends the group.

    The folder's events are hints where they come; in between the pause grows from milliseconds to half a second with
    jitter, so an idle node costs next to nothing and a hundred nodes do not look at the same instant.
    """
    pause_s = FIRST_PAUSE_S
    before: object = None
    progress_log = ProgressLog(member, say)
    with member.heartbeat.beating():
        while True:
            if stop():
                member.leave(f"asked to end by {stop.signal_name or 'a signal'}")
            if (exit := member.tick()) is not None:
                return exit
            now = (member.own.state, member.own.position, member.own.arrived, member.group and member.group.position)
            pause_s = FIRST_PAUSE_S if now != before else min(pause_s * GROWTH, MAX_PAUSE_S)
            before = now
            progress_log.update()
            watcher.wait(pause_s * random.uniform(0.7, 1.0))


class ProgressLog:
    """The messages of a node: each event once, which nodes it waits for each second, which joined or were lost."""

    def __init__(self, member: Member, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._member = member
        self._say = say
        self._clock = clock
        self._place: object = None
        self._place_since = self._logged_at = clock()
        self._logged = ""
        self._news: str | None = None

    def update(self) -> None:
        """Called after each look."""
        member, now = self._member, self._clock()
        place = (member.own.state, member.own.position, member.own.arrived)
        if place != self._place:
            self._place, self._place_since = place, now
        self._log_members()
        text = member.waiting_on or (f"working: {member.own.position}" if member.own.position else "")
        is_due = bool(member.waiting_on) and now - self._logged_at >= SAY_AGAIN_S
        if text and (text != self._logged or is_due):
            waited_s, is_joining = now - self._place_since, member.own.state is NodeState.JOINING
            limit_s = member.setting.gather_timeout_s if is_joining else member.setting.barrier_timeout_s
            again = f" ({waited_s:.0f} s of at most {limit_s:g} s)" if waited_s >= SAY_AGAIN_S else ""
            self._say(f"waits for {text}{again}" if member.waiting_on else text)
            self._logged, self._logged_at = text, now

    def _log_members(self) -> None:
        group = self._member.group
        if group is None or group.state is not GroupState.RUNNING or group.reason == self._news:
            return
        self._news = group.reason
        self._say(f"the group goes on with nodes {', '.join(map(str, sorted(group.members)))}: {group.reason}")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 refused, 75 a node died, 130 interrupted."""
    stop = StopFlag().install()
    try:
        flags = parse_flags(sys.argv[1:] if argv is None else argv, os.environ)
        ranks = num_ranks(flags, lambda: count_gpus(os.environ))
    except (FlagError, ConfigError) as error:
        complain("multinode", error)
        return EXIT_REFUSED
    if flags.dry_run:
        print(phase_table(flags, ranks))
        return 0
    logger = setup_logger(f"node {flags.rank}", flags.config.log.level)
    try:
        member, watcher = build_member(flags, ranks)
    except OSError as error:
        complain("multinode", f"--log-path {flags.log_path} cannot be used: {error}")
        return EXIT_REFUSED
    with watcher:
        exit = drive(member, watcher, stop, say=logger.info)
    (logger.info if exit.code == 0 else logger.error)("%s", exit.reason)
    return exit.code


def build_member(flags: NodeFlags, ranks: int) -> tuple[Member, Watcher]:
    """This node with that many ranks of the trainer, and the watcher that wakes it."""
    flags.log_path.mkdir(parents=True, exist_ok=True)
    output = OutputDir(flags.log_path.resolve())
    is_master = flags.rank == MASTER_RANK
    own = own_record(flags)
    setting = group_setting(flags, own.fingerprint)
    # A worker reads only the master's record and its own; the rest is in the group's.
    ranks_read = None if is_master else frozenset({MASTER_RANK, flags.rank})
    store = DiskStore(output, setting, weight=flags.weights[flags.rank], ranks=ranks_read)

    def master() -> NodeRecord | None:
        return own if is_master else store.read_nodes().get(MASTER_RANK)

    work = PhaseWork(
        WorkSetting(
            rank=flags.rank,
            incarnation=own.incarnation,
            rl_phase=flags.rl_phase,
            weights=flags.weights,
            address=own.address,
            master=lambda: known.address if (known := master()) else None,
            eval_interval=flags.eval_interval,
            splits=flags.splits,
            max_iterations=flags.max_iterations,
            num_ranks=ranks,
        ),
        flags.config,
        output,
        wake=lambda: watcher.wake(),
    )
    needs_network = not is_master and flags.rl_phase is not RlPhase.ROLLOUT
    member = Member(
        setting,
        own,
        store,
        work,
        clock=time.monotonic,
        # Rollouts need only the folder, no network between the nodes.
        unreached=Prober(master, flags.config.heartbeat_s).count if needs_network else lambda epoch: 0,
    )
    store.waiting_on = lambda: member.waiting_on
    watcher = Watcher([output.multinode if is_master else output.group_status.parent], rescan_s=60.0)
    return member, watcher


def own_record(flags: NodeFlags) -> NodeRecord:
    """This node's first record. From now on the master of other nodes answers probes at its port."""
    is_master = flags.rank == MASTER_RANK
    incarnation = secrets.token_hex(8)
    return NodeRecord(
        flags.rank,
        incarnation,
        0,
        fingerprint=flags.fingerprint(code_version()),
        host=socket.gethostname(),
        address=(is_master and flags.master_addr) or own_address(),
        port=ProbeServer(incarnation).port if is_master and flags.num_nodes > 1 else 0,
        pid=os.getpid(),
    )


def group_setting(flags: NodeFlags, fingerprint: Mapping[str, str]) -> GroupSetting:
    """The settings that decisions need of the flags. `fingerprint`: those that must be equal on all nodes."""
    return GroupSetting(
        flags.rank,
        flags.num_nodes,
        flags.rl_phase,
        fingerprint,
        elastic=flags.elastic,
        max_iterations=flags.max_iterations,
        heartbeat_s=flags.config.heartbeat_s,
        barrier_timeout_s=flags.config.barrier_timeout_s,
        gather_timeout_s=flags.config.gather_timeout_s,
        loop_timeout_s=flags.config.loop_timeout_s,
    )


def code_version() -> str:
    """Changes with every change of this package's code: all nodes must run the same."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


def phase_table(flags: NodeFlags, ranks: int) -> str:
    """The plan of this command, phase by phase."""
    side = "master" if flags.rank == MASTER_RANK else f"worker {flags.rank}"
    trainer = f"{ranks} rank{'s' * (ranks != 1)} of the trainer"
    lines = [f"{side} of {flags.num_nodes} nodes, {trainer}, {flags.log_path}", "phase  what this node does  ->  proof"]
    for phase in phases_of(flags.rl_phase):
        rule = RULES[phase]
        does = rule.master if flags.rank == MASTER_RANK else rule.worker
        proof = f"  ->  multinode/{rule.proof.format('N')}" if rule.proof else ""
        lines.append(f"{int(phase):5}  {phase.label}: {does}{proof}")
    return "\n".join(lines)


_SPLITS: Mapping[str | None, frozenset[Split]] = {
    None: frozenset({"train", "eval"}),
    "train-only": frozenset({"train"}),
    "eval-only": frozenset({"eval"}),
}


@dataclass(frozen=True)
class NodeFlags:
    """The settings that one node was started with. `log_path` is the output_dir."""

    data_path: Path
    log_path: Path
    rl_phase: RlPhase
    rank: int
    num_nodes: int
    weights: tuple[float, ...]
    eval_interval: int | None
    splits: frozenset[Split]
    max_iterations: int | None
    master_addr: str | None
    elastic: bool
    dry_run: bool
    config: MultinodeConfig

    def fingerprint(self, code_version: str) -> dict[str, str]:
        """The settings that have to be equal on all nodes, by flag."""
        weights = ",".join(f"{weight:g}" for weight in self.weights)
        return {
            "--num-nodes": str(self.num_nodes),
            "--rank-weights": weights,
            "--rl-phase": str(self.rl_phase),
            "--eval-interval": str(self.eval_interval),
            "--rollout-split": ",".join(sorted(self.splits)),
            "--max-iterations": str(self.max_iterations),
            "--elastic": str(self.elastic),
            "--log-path": str(self.log_path.resolve()),
            "code version": code_version,
            **flatten(self.config.model_dump(mode="json", exclude={"log", "gpus_per_node"})),
        }


def num_ranks(flags: NodeFlags, num_gpus: Callable[[], int]) -> int:
    """Ranks of the trainer on this node; `num_gpus` counts its GPUs. Raises FlagError for more ranks than GPUs."""
    wanted = flags.config.gpus_per_node
    found = 0 if flags.config.trainer.get("device") == "cpu" else num_gpus()
    if wanted and found and wanted > found:
        raise FlagError(f"--gpus-per-node {wanted}: this node has {found}, by nvidia-smi -L and CUDA_VISIBLE_DEVICES")
    return wanted or found or 1


def flatten(value: object, key: str = "") -> dict[str, str]:
    """Each value of a config by its dotted key, for short messages about differences."""
    if isinstance(value, dict) and value:
        parts = [flatten(part, f"{key}.{name}" if key else str(name)) for name, part in value.items()]
        return {name: text for part in parts for name, text in part.items()}
    return {key: str(value)}


def parse_flags(argv: Sequence[str], environment: Mapping[str, str]) -> NodeFlags:
    """Raises FlagError, or ConfigError for the TOML and its overrides."""
    found, rest = node_parser().parse_known_args(list(argv))
    for word in rest:
        key = word.removeprefix("--").partition("=")[0].partition(".")[0]
        if word.startswith("--") and key not in MultinodeConfig.model_fields:
            raise FlagError(f"unknown flag {word}: prl multinode start --help lists all flags")
    for name, path in (("--data-path", found.data_path), ("--log-path", found.log_path)):
        if path is None:
            raise FlagError(f"{name} is required: a folder that all nodes share")
    if not found.data_path.is_dir():
        raise FlagError(f"--data-path {found.data_path}: folder not found")
    num_nodes = _at_least("--num-nodes", found.num_nodes, 1)
    rank = _rank(found, environment, num_nodes)
    if found.rl_phase not in list(RlPhase):
        raise FlagError(f"--rl-phase {found.rl_phase}: must be one of {', '.join(RlPhase)}")
    rl_phase = RlPhase(found.rl_phase)
    if found.eval_interval is not None and rl_phase is RlPhase.UPDATE:
        raise FlagError("--eval-interval requires --rl-phase both or rollout: an update evaluates nothing")
    if found.master_addr and rank:
        raise FlagError(f"--master-addr requires --master, but this is rank {rank}: workers get it from the master")
    if found.resume and not OutputDir(found.log_path).list_iterations():
        raise FlagError(f"--resume: nothing to resume in {found.log_path}; remove it to begin")
    data, source = read_argv(rest)
    if source == "command line":
        data, source = merge(read_argv(["@", str(DEFAULT_TOML)])[0], data), str(DEFAULT_TOML)
    if found.debug_mode:
        data = merge(data, {"log": {"level": "debug"}})
    if found.gpus_per_node is not None:
        data = merge(data, {"gpus_per_node": _at_least("--gpus-per-node", found.gpus_per_node, 1)})
    config = build(MultinodeConfig, data, source)
    folder = found.data_path.resolve() / config.model.name
    if folder.is_dir():  # a model's name that is a folder below the data path means that folder
        config = config.model_copy(update={"model": config.model.model_copy(update={"name": str(folder)})})
    if found.eval_interval is not None and not config.run.get("eval"):
        raise FlagError(f"--eval-interval: {source} has no [run.eval]: add what to evaluate")
    return NodeFlags(
        data_path=found.data_path.resolve(),
        log_path=found.log_path,
        rl_phase=rl_phase,
        rank=rank,
        num_nodes=num_nodes,
        weights=_weights(found.rank_weights, num_nodes),
        eval_interval=None if found.eval_interval is None else _at_least("--eval-interval", found.eval_interval, 1),
        splits=_splits(found),
        max_iterations=None if found.max_iterations is None else _at_least("--max-iterations", found.max_iterations, 1),
        master_addr=found.master_addr,
        elastic=found.elastic,
        dry_run=found.dry_run,
        config=config,
    )


def _rank(found: argparse.Namespace, environment: Mapping[str, str], num_nodes: int) -> int:
    if found.master and found.worker is not None:
        raise FlagError("--master and --worker exclude each other: use one of them")
    if found.master:
        return 0
    if found.worker is not None:
        if num_nodes == 1:
            raise FlagError(f"--worker {found.worker}: invalid with --num-nodes 1, which has no workers")
        if not 1 <= found.worker < num_nodes:
            raise FlagError(f"--worker {found.worker}: must be from 1 to {num_nodes - 1} with --num-nodes {num_nodes}")
        return int(found.worker)
    for name in ("RANK", "NODE_RANK"):
        if value := environment.get(name):
            if not value.isdecimal() or int(value) >= num_nodes:
                raise FlagError(f"{name}={value}: must be from 0 to {num_nodes - 1} with --num-nodes {num_nodes}")
            return int(value)
    if num_nodes == 1:
        return 0
    raise FlagError("--master or --worker R is required (or RANK or NODE_RANK in the environment)")


def _weights(text: str | None, num_nodes: int) -> tuple[float, ...]:
    if text is None:
        if num_nodes == 1:
            return (1.0,)
        raise FlagError(f"--rank-weights is required: {num_nodes} numbers, such as {','.join(['1'] * num_nodes)}")
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise FlagError(f"--rank-weights {text}: must be numbers separated by commas") from None
    if len(weights) != num_nodes:
        raise FlagError(f"--rank-weights {text}: {len(weights)} numbers, expected one per node: {num_nodes}")
    if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise FlagError(f"--rank-weights {text}: must be 0 or more, and not all 0")
    return weights


def _splits(found: argparse.Namespace) -> frozenset[Split]:
    if found.rollout_split not in _SPLITS:
        raise FlagError(f"--rollout-split {found.rollout_split}: must be train-only or eval-only, or omitted for both")
    if found.rollout_split == "eval-only" and found.eval_interval is None:
        raise FlagError("--rollout-split eval-only requires --eval-interval N: without it nothing is evaluated")
    if found.rollout_split == "train-only" and found.eval_interval is not None:
        raise FlagError("--rollout-split train-only and --eval-interval exclude each other: remove one of them")
    if found.rollout_split and found.rl_phase != RlPhase.ROLLOUT:
        raise FlagError(
            f"--rollout-split requires --rl-phase rollout, found {found.rl_phase}: an update needs rollouts"
        )
    return _SPLITS[found.rollout_split]


def _at_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise FlagError(f"{name} {value}: must be {least} or more")
    return value


if __name__ == "__main__":
    sys.exit(main())
