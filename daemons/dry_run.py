"""What a start of a workspace would do: which daemon goes where, with which command. Starts and writes nothing.

The places are worked out by the code that a start uses. Where the nodes are not known yet (a job that is not
submitted), they are called node1, node2 and so on; starts that do not exist have the number 000000000000.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from daemons.launchers.placement import Place, compact, nodes_needed, place_all
from daemons.launchers.slurm import Allocation, step_command
from daemons.specs import DaemonSpec, on_nodes, orchestrator_spec, service_specs
from daemons.submit import is_for_a_job, script, submission
from prime_rl.configs.deployment import SlurmConfig
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.layout import OutputDir, RunDir

_START = "0" * 12
# Stands for the name of a run.
EACH_RUN = "run_ID"


@dataclass(frozen=True)
class Planned:
    """One daemon: its nodes (none where the engine chooses), their number, GPUs on each, ranks in all, and argv."""

    name: str
    nodes: tuple[str, ...]
    num_nodes: int
    gpus: tuple[int, ...]
    ranks: int
    command: tuple[str, ...]

    @property
    def where(self) -> str:
        """The nodes as Slurm writes them, such as `node[1-4]`; `any` or `any 3` where the engine chooses them."""
        return compact(self.nodes) if self.nodes else f"any {self.num_nodes}" if self.num_nodes > 1 else "any"


@dataclass(frozen=True)
class Plan:
    """`submit` and `script`: of the job that would be submitted, empty where there is none."""

    engine: str
    nodes: tuple[str, ...]
    submit: tuple[str, ...]
    script: str
    daemons: tuple[Planned, ...]

    def as_json(self) -> dict[str, Any]:
        """All fields as plain data, for `prl up --dry-run --json`."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people: the job, the table, the commands."""
        size = f", {len(self.nodes)} node{'s' if len(self.nodes) > 1 else ''}" if self.nodes else ""
        found = [f"engine {self.engine}{size}"]
        if self.submit:
            found += ["", f"job: {shlex.join(self.submit)}", *(f"  {line}" for line in self.script.splitlines())]
        cells = [("daemon", "nodes", "GPUs of each", "ranks")]
        for each in self.daemons:
            gpus = compact([str(number) for number in each.gpus]).strip("[]")
            cells.append((each.name, each.where, gpus or "-", str(each.ranks)))
        widths = [max(len(row[column]) for row in cells) for column in range(4)]
        found += [
            "",
            *("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells),
            "",
        ]
        return [*found, *(f"{each.name}: {shlex.join(each.command)}" for each in self.daemons)]


def plan_of(system: SystemConfig, output: OutputDir) -> Plan:
    """Raises LaunchError where the daemons do not fit onto the nodes."""
    output = OutputDir(output.path.resolve())  # as a start names it
    specs = service_specs(output, system)
    run = orchestrator_spec(RunDir(output.path / EACH_RUN), system)
    if system.deployment.engine == "slurm":
        return _on_slurm(system, output, specs, run)
    if system.deployment.engine == "ray":
        daemons = [_planned(spec, Place((), tuple(range(spec.gpus))), _on_ray(spec)) for spec in (*specs, run)]
        return Plan("ray", (), (), "", tuple(daemons))
    here = (socket.gethostname(),)
    daemons = [_planned(spec, Place(here, spec.devices), spec.argv) for spec in (*specs, run)]
    return Plan("local", here, (), "", tuple(daemons))


def _on_slurm(system: SystemConfig, output: OutputDir, specs: Sequence[DaemonSpec], run: DaemonSpec) -> Plan:
    table, here = system.deployment.slurm or SlurmConfig(), Allocation.of()
    is_submitted = is_for_a_job(system)
    if here is None:
        nodes = [f"node{number + 1}" for number in range(table.nodes or nodes_needed(specs, table.gpus_per_node))]
    else:
        nodes = here.usable_nodes()
    job = here.job if here else "JOB"
    daemons = []
    places = place_all(specs, nodes, table.gpus_per_node) | {run.name: Place((nodes[0],))}
    for spec in (*specs, run):
        place = places[spec.name]
        several = len(place.nodes) > 1
        address = (here.address(place.nodes[0]) if here else place.nodes[0]) if several else ""
        command = step_command(output, spec, job, _START, place, address)
        daemons.append(_planned(spec, place, tuple(command)))
    submit = tuple(submission(system, output)) if is_submitted else ()
    return Plan("slurm", tuple(nodes), submit, script(output) if is_submitted else "", tuple(daemons))


def _on_ray(spec: DaemonSpec) -> tuple[str, ...]:
    """Ray chooses the node where ranks meet, and a port there."""
    return on_nodes(spec.argv, spec.num_nodes, "NODE:PORT", _START) if spec.num_nodes > 1 else spec.argv


def _planned(spec: DaemonSpec, place: Place, command: Sequence[str]) -> Planned:
    num_nodes = len(place.nodes) or spec.num_nodes
    return Planned(spec.name, place.nodes, num_nodes, place.devices, spec.ranks * num_nodes, tuple(command))
