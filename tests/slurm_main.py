"""Runs inside a Slurm job: one daemon after another through each act of the launcher. Prints a line for each.

python -m tests.slurm_main OUTPUT_DIR
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from daemons.launchers import slurm
from daemons.launchers.agent import read_starts
from daemons.launchers.base import Alive, Ended, Handle
from daemons.launchers.slurm import Allocation, Slurm
from daemons.specs import DaemonSpec
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import DaemonStatus
from tests.patience import PATIENCE_S

WAITS = "import time; time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); {WAITS}"


class Acts:
    def __init__(self, output: OutputDir) -> None:
        allocation = Allocation.of()
        assert allocation is not None
        self.output, self.allocation = output, allocation
        self.slurm = Slurm(output, allocation)
        self.log = output.log("trainer")

    def start(self, code: str, **where: Any) -> Handle:
        return self.slurm.start(DaemonSpec("trainer", (sys.executable, "-c", code), self.log, **where))

    def runs(self, handle: Handle, num_nodes: int = 1) -> None:
        def all_there() -> bool:
            seen = self.slurm.look(handle)
            assert isinstance(seen, Alive), seen
            records = read_starts(self.output, handle.name, handle.start_id)
            return len(records) == num_nodes and all(record.process for record in records.values())

        self.wait(all_there, "the daemon to run")

    def end(self, handle: Handle) -> Ended:
        self.wait(lambda: isinstance(self.slurm.look(handle), Ended), "the daemon to end")
        seen = self.slurm.look(handle)
        assert isinstance(seen, Ended)
        return seen

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        wait_for(condition, what, timeout_s=PATIENCE_S)

    def exit_code(self) -> None:
        assert self.end(self.start("exit(3)")).exit_code == 3

    def two_nodes_adopted_and_stopped(self) -> None:
        handle = self.start(WAITS, num_nodes=2)
        self.runs(handle, 2)
        other = Slurm(self.output, self.allocation)
        record = DaemonStatus(name="trainer", handle=handle)
        assert other.adopt(record) == handle
        other.stop(handle, PATIENCE_S)
        assert self.end(handle).exit_code == -15
        self.wait(lambda: Slurm(self.output, self.allocation).adopt(record) is None, "nothing to adopt")

    def stubborn_is_killed(self) -> None:
        handle = self.start(STUBBORN)
        # A line of its own: the log begins with the command, which has the word too.
        self.wait(lambda: self.log.exists() and "ready" in self.log.read_text().splitlines(), "SIGTERM to be ignored")
        self.slurm.stop(handle, 0.5)
        assert self.end(handle).exit_code == -9

    def node_down_then_what_is_left(self) -> None:
        handle = self.start(WAITS, num_nodes=3)
        self.runs(handle, 3)
        lost = handle.ref.split()[2].split(",")[1]
        subprocess.run(["scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=test"], check=True)
        seen = self.end(handle)
        assert seen.reason is not None or seen.exit_code in (-15, -9), seen
        self.slurm.stop(handle, 0)
        again = self.start(WAITS, num_nodes=3, min_nodes=2)
        assert len(again.ref.split()[2].split(",")) == 2 and lost not in again.ref
        self.runs(again, 2)
        self.slurm.stop(again, 0)
        self.end(again)


def main(folder: Path) -> None:
    # No supervisor's loop waits here: a controller on a busy host is given the time it takes.
    slurm.COMMAND_TIMEOUT_S = slurm.FIRST_TIMEOUT_S = PATIENCE_S
    output = OutputDir(folder)
    output.daemons.mkdir(parents=True)
    acts = Acts(output)
    for act in (
        acts.exit_code,
        acts.two_nodes_adopted_and_stopped,
        acts.stubborn_is_killed,
        acts.node_down_then_what_is_left,
    ):
        act()
        print(f"done: {act.__name__}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
