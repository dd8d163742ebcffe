"""Runs inside a Slurm job: a whole workspace whose daemons are steps of the job. Prints a line for each act.

python -m tests.slurm_system_main FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

from daemons.workspace import SUPERVISOR
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import DaemonStatus, read_status
from prime_rl.utils.process import ProcessId
from tests.daemons_support import fake_workspace
from tests.patience import PATIENCE_S


class Acts:
    def __init__(self, folder: Path) -> None:
        self.prl = fake_workspace(folder)
        self.prl.output_dir.mkdir()
        self.output = OutputDir(self.prl.output_dir)

    def record(self, name: str) -> DaemonStatus:
        status = read_status(self.output.daemon_status(name), DaemonStatus)
        assert status is not None, name
        return status

    def process(self, name: str) -> ProcessId:
        process = self.record(name).child
        assert process is not None, name
        return process

    def up(self) -> None:
        self.prl.up("--deployment.engine", "slurm")
        self.prl("runs", "add", str(self.prl.run_file(max_steps=100_000)))
        self.prl.wait_state("run_reverse", "active")
        for name in ("trainer", "inference", "run_reverse"):
            wait_for(partial(self.has_started, name), f"a record of {name}", timeout_s=PATIENCE_S)
            handle = self.record(name).handle
            assert handle is not None and handle.engine == "slurm", (name, handle)

    def has_started(self, name: str) -> bool:
        status = read_status(self.output.daemon_status(name), DaemonStatus)
        return status is not None and status.state == "running"

    def adopted_by_the_next_supervisor(self) -> None:
        names = ("trainer", "inference")
        before = [self.process(name) for name in names]
        supervisor = self.record(SUPERVISOR).writer
        os.kill(supervisor.pid, signal.SIGKILL)
        wait_for(lambda: not supervisor.is_running(), "the supervisor to be dead", timeout_s=PATIENCE_S)
        self.prl.up("--deployment.engine", "slurm")
        assert [self.process(name) for name in names] == before and all(each.is_running() for each in before)
        # prl up returns when the daemons answer, which they do all the time: the records may be the old ones yet.
        for name in names:
            wait_for(partial(self.is_adopted, name, supervisor), f"{name} to be adopted", timeout_s=PATIENCE_S)
        assert [self.process(name) for name in names] == before

    def is_adopted(self, name: str, from_supervisor: ProcessId) -> bool:
        return not self.record(name).writer.is_same(from_supervisor)

    def restarted_after_a_kill(self) -> None:
        before = self.process("trainer")
        os.kill(before.pid, signal.SIGKILL)

        def again() -> bool:
            now = self.record("trainer")
            return now.state == "running" and now.child not in (None, before)

        wait_for(again, "the trainer to run again", timeout_s=PATIENCE_S)
        assert self.record("trainer").crashes[-1].exit_code == -9

    def down(self) -> None:
        self.prl("down")
        # An agent has written its last record, and its srun knows nothing yet.
        wait_for(lambda: self.prl.members() == [], "all that ran for the daemons to end", timeout_s=PATIENCE_S)
        assert self.record("trainer").state == "stopped" and self.record("trainer").handle is None


def main(folder: Path) -> None:
    folder.mkdir()
    acts = Acts(folder)
    for act in (acts.up, acts.adopted_by_the_next_supervisor, acts.restarted_after_a_kill, acts.down):
        act()
        print(f"done: {act.__name__}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
