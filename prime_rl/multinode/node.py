"""One node of a multi-node group: `prl multinode`, or `python -m prime_rl.multinode.node`. Parse, build, drive, end.

Master and workers run the same loop on the same files; rank 0 also leads. Exit codes: 0 done, 1 this node failed, 2
wrong usage or refused by the group, 75 a node died (start the same commands again), 130 interrupted.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from prime_rl import __version__
from prime_rl.configs.base import ConfigError
from prime_rl.configs.node_flags import FlagError
from prime_rl.contract.layout import OutputDir
from prime_rl.multinode.decide import MASTER_RANK
from prime_rl.multinode.flags import NodeFlags, num_ranks, parse_flags
from prime_rl.multinode.loop import drive
from prime_rl.multinode.member import Member
from prime_rl.multinode.phases import RULES, RlPhase, phases_of
from prime_rl.multinode.place import WorkSetting
from prime_rl.multinode.reach import Prober, ProbeServer
from prime_rl.multinode.records import EXIT_REFUSED, GroupSetting, NodeRecord
from prime_rl.multinode.store import DiskStore, NodeFacts
from prime_rl.multinode.work import PhaseWork
from prime_rl.utils.gpus import count_gpus
from prime_rl.utils.logger import complain, setup_logger
from prime_rl.utils.network import own_address
from prime_rl.utils.signals import StopFlag
from prime_rl.utils.watch import Watcher


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
    facts = NodeFacts(
        flags.num_nodes, flags.weights[flags.rank], str(flags.rl_phase), setting.heartbeat_s, setting.loop_limit_s
    )
    # A worker reads only the master's record and its own; the rest is in the group's.
    store = DiskStore(output, facts, ranks=None if is_master else frozenset({MASTER_RANK, flags.rank}))

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
    """What the decisions need of the flags. `fingerprint`: the settings that must be equal on all nodes."""
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
    """What this command would do, phase by phase."""
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
