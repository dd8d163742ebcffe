"""One node of a multi-node group: `prl multinode`, or `python -m prime_rl.multinode.node`. Parse, build, drive, end.

Master and workers run the same loop on the same files; rank 0 also leads. Exit codes: 0 done, 1 this node failed, 2
wrong usage or refused by the group, 75 a node died (start the same commands again), 130 interrupted.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prime_rl import __version__
from prime_rl.configs.base import ConfigError
from prime_rl.configs.node_flags import FlagError
from prime_rl.contract.layout import OutputDir
from prime_rl.multinode.decide import MASTER_RANK, Exit
from prime_rl.multinode.flags import NodeFlags, num_ranks, parse_flags
from prime_rl.multinode.heartbeat import Prober, ProbeServer
from prime_rl.multinode.member import Member
from prime_rl.multinode.place import WorkSetting
from prime_rl.multinode.records import (
    EXIT_REFUSED,
    RULES,
    GroupSetting,
    GroupState,
    NodeRecord,
    NodeState,
    RlPhase,
    phases_of,
)
from prime_rl.multinode.store import DiskStore
from prime_rl.multinode.work import PhaseWork
from prime_rl.utils.logger import complain, setup_logger
from prime_rl.utils.network import own_address
from prime_rl.utils.runtime import count_gpus
from prime_rl.utils.signals import StopFlag
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
            waited_s = now - self._place_since
            again = f" ({waited_s:.0f} s of at most {self._limit_s:g} s)" if waited_s >= SAY_AGAIN_S else ""
            self._say(f"waits for {text}{again}" if member.waiting_on else text)
            self._logged, self._logged_at = text, now

    @property
    def _limit_s(self) -> float:
        setting = self._member.setting
        is_joining = self._member.own.state is NodeState.JOINING
        return setting.gather_timeout_s if is_joining else setting.barrier_timeout_s

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

    def master_address() -> str | None:
        known = master()
        return known.address if known else None

    work = PhaseWork(
        WorkSetting(
            rank=flags.rank,
            incarnation=own.incarnation,
            rl_phase=flags.rl_phase,
            weights=flags.weights,
            address=own.address,
            master=master_address,
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


if __name__ == "__main__":
    sys.exit(main())
