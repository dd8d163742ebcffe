"""`prl multinode`: starts one node of a group in its own process (`prime_rl.multinode`), and shows all of them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from daemons.commands.common import (
    FittingTable,
    JsonOption,
    Passing,
    WatchOption,
    console,
    existing_output,
    flags_help,
    make_table,
    print_json,
    say,
    short_time,
    watch,
)
from daemons.errors import need_cpu
from prime_rl.configs.multinode import EXAMPLE, node_parser
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.nodes import NodeHealth, NodeReader, SeenNode, node_health, stall, waited_for
from prime_rl.contract.status import GroupStatus, read_status

NODE = "prime_rl.multinode.node"
LOOK_EVERY_S = 0.1
DEFAULT = "start"

START_HELP = """Run one node of a group; `start` may be omitted.

prl multinode status shows the group."""


class OrStart(TyperGroup):
    """`prl multinode --flags` is `prl multinode start --flags`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `start` in front unless the first word is a command; so `--help` alone shows the help of `start`."""
        return super().parse_args(ctx, args if args and args[0] in self.commands else [DEFAULT, *args])


multinode_app = typer.Typer(cls=OrStart, help="Train on several machines that share a folder.")


@multinode_app.command(
    DEFAULT,
    help=flags_help(START_HELP, f"prl multinode start {EXAMPLE}", node_parser()),
    cls=Passing,
)
def start(context: typer.Context) -> None:
    """Replace this process with that of one node."""
    if "--dry-run" not in context.args:
        need_cpu()
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", NODE, *context.args])


@multinode_app.command()
def status(
    log_path: Annotated[
        Path | None,
        typer.Option(
            "--log-path",
            "--output-dir",
            metavar="DIR",
            help="The group's folder. Default: PRL_OUTPUT_DIR, else outputs.",
        ),
    ] = None,
    as_json: JsonOption = False,
    keep: WatchOption = False,
) -> None:
    """Show each node's health and phase, and what it waits for.

    Example: prl multinode status --log-path outputs/group --json
    """
    look = GroupLook(existing_output(log_path, may_miss=keep or as_json))
    if keep and not as_json:
        watch(look.table)
        return
    look.settle()
    if as_json:
        print_json(look.as_json())
    elif look.nodes:
        console().print(look.table())
    else:
        say(f"no node has started in {look.output.path}; see prl multinode start --help")


class GroupLook:
    """The nodes of a group, and whether each was seen to move, by this process's own clock."""

    def __init__(self, output: OutputDir) -> None:
        self.output = output
        self.nodes: list[SeenNode] = []
        self._reader = NodeReader(output.path)

    def settle(self) -> None:
        """Look until every node whose state is running has moved, or has had the time to."""
        began = time.monotonic()
        self.look()
        patience_s = 1.5 * max((seen.status.heartbeat_s for seen in self.nodes), default=0.0)
        while time.monotonic() - began < patience_s and NodeHealth.UNPROVEN in map(node_health, self.nodes):
            time.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Read the status of all nodes once, into `nodes`, by rank."""
        self.nodes = sorted(self._reader.read(), key=lambda seen: seen.status.rank)

    def table(self) -> Any:
        """Look once more, and return a table with a row a node; without nodes it has one line of text."""
        self.look()
        awaited = set(self._awaited())
        columns = ("NODE", "HOST", "HEALTH", "ITERATION", "PHASE", "IN IT", "BEAT", "EPOCH", "WAITS FOR")
        rows = [self._row(seen, awaited) for seen in self.nodes]
        return FittingTable(columns, rows, ("EPOCH", "HOST", "BEAT")) if rows else make_table([""], [["no nodes yet"]])

    def _row(self, seen: SeenNode, awaited: set[int]) -> list[object]:
        node = seen.status
        phase = f"{node.phase} {node.phase_name}" + (" (awaited)" if node.rank in awaited else "")
        words = [node.rank, node.host, node_health(seen), node.iteration or "", phase if node.phase >= 0 else ""]
        times = [short_time(seen.phase_s), short_time(seen.silent_s)]
        found = stall(seen)
        stalled = f"is alive, but {found.what} has stood still for {short_time(found.for_s)}" if found else None
        return [*words, *times, node.epoch or "", stalled or node.reason or node.waiting_on or ""]

    def _awaited(self) -> list[int]:
        return waited_for(seen.status for seen in self.nodes)

    def as_json(self) -> dict[str, Any]:
        """The nodes of the last look, and the ranks that the others wait for, as plain data.

        `group` is read now; it is None while its status file does not exist.
        """
        group = read_status(self.output.group_status, GroupStatus)
        nodes = [
            {
                "rank": seen.status.rank,
                "host": seen.status.host,
                "address": seen.status.address,
                "pid": seen.status.pid,
                "health": str(node_health(seen)),
                "state": seen.status.state,
                "epoch": seen.status.epoch,
                "iteration": seen.status.iteration,
                "phase": seen.status.phase,
                "phase_name": seen.status.phase_name,
                "arrived": seen.status.arrived,
                "phase_s": round(seen.phase_s, 3),
                "silent_s": round(seen.silent_s, 3),
                "stalled_s": round(found.for_s, 3) if (found := stall(seen)) else None,
                "loop": seen.status.loop,
                "progress": seen.status.progress,
                "waiting_on": seen.status.waiting_on,
                "reason": seen.status.reason,
            }
            for seen in self.nodes
        ]
        words = {"state": group.state, "reason": group.reason, "exit_code": group.exit_code} if group else None
        return {"group": words, "waited_for": self._awaited(), "nodes": nodes}
