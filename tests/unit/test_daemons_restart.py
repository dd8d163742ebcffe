"""How long `prl restart` waits: as long as the daemon that it restarts may take to finish."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from daemons.errors import ActionError
from daemons.specs import write_component_configs
from daemons.up_and_down import restart_daemon
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import DaemonStatus
from prime_rl.utils.process import ProcessId

DRAIN_S, GRACE_S = 90.0, 5.0


@dataclass
class Saving:
    """A workspace whose trainer saves for `saves_s` seconds before it ends and is started again, and the time there."""

    output: OutputDir
    saves_s: float
    now: float = 0.0

    def write(self, name: str, child: int | None) -> None:
        status = DaemonStatus(name=name, state="running", child_pid=child, updated_at=time.time())
        status.sign(ProcessId.of(os.getpid()))
        write_atomic(self.output.daemon_status(name), msgspec.json.encode(status))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.saves_s:
            self.write("trainer", 4712)

    def restart(self) -> list[str]:
        said: list[str] = []
        restart_daemon(self.output.path, "trainer", say=said.append, clock=lambda: self.now, sleep=self.sleep)
        return said


def saving(path: Path, saves_s: float) -> Saving:
    workspace = Saving(OutputDir(path), saves_s)
    workspace.output.daemons.mkdir(parents=True)
    limits = {"drain_s": DRAIN_S, "grace_s": GRACE_S}
    write_component_configs(SystemConfig.model_validate({"supervisor": limits}), workspace.output)
    workspace.write("supervisor", None)
    workspace.write("trainer", 4711)
    return workspace


def test_a_daemon_that_saves_as_long_as_it_may_is_waited_for(tmp_path: Path) -> None:
    workspace = saving(tmp_path / "workspace", DRAIN_S + GRACE_S)
    assert workspace.restart() == ["waiting for trainer to restart; first it may finish and save, for up to 90 s"]
    assert workspace.now >= DRAIN_S + GRACE_S


def test_the_wait_ends_and_says_what_it_was_for(tmp_path: Path) -> None:
    workspace = saving(tmp_path / "workspace", 10 * DRAIN_S)
    with pytest.raises(ActionError, match=r"for trainer to restart \(supervisor\.drain_s = 90 to finish, grace"):
        workspace.restart()
    assert workspace.now < 2 * DRAIN_S
