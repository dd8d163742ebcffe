"""Which runs get an orchestrator, and which ask for monitors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from daemons.specs import RunNow, wanted_daemons, wants_monitors, wants_orchestrator, write_component_configs
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import RunStatus


def status(state: str, max_steps: int = 10) -> RunStatus:
    return RunStatus(run_id="run_a", state=state, max_steps=max_steps)


def test_which_runs_want_an_orchestrator() -> None:
    run = RunNow("run_a", in_slot=True, evicted=False, gone=False, status=None, max_steps=None)
    early = RunStatus(run_id="run_a", state="finished", max_steps=10, reason="its budget is used up")
    assert wants_orchestrator(run)
    assert wants_orchestrator(replace(run, status=status("evicted")))  # and evicted.txt is gone: readmitted
    assert wants_orchestrator(replace(run, status=status("finished"), max_steps=20))  # raised since
    assert not wants_orchestrator(replace(run, status=status("finished"), max_steps=10))
    assert wants_orchestrator(replace(run, status=early, max_steps=10))  # readmitted
    assert not wants_orchestrator(replace(run, status=status("failed")))
    assert not wants_orchestrator(replace(run, in_slot=False))
    assert not wants_orchestrator(replace(run, evicted=True))
    assert not wants_orchestrator(replace(run, gone=True))


def test_which_runs_ask_for_monitors() -> None:
    run = RunNow("run_a", in_slot=True, evicted=False, gone=False, status=None, max_steps=None, has_monitors=True)
    assert wants_monitors(run)
    assert wants_monitors(replace(run, status=status("finished")))  # the trainer may have a line to write
    assert wants_monitors(replace(run, in_slot=False, status=status("running")))  # its last evaluation
    assert not wants_monitors(replace(run, in_slot=False, status=status("finished")))
    assert not wants_monitors(replace(run, in_slot=False))
    assert not wants_monitors(replace(run, in_slot=False, status=status("running"), evicted=True))
    assert not wants_monitors(replace(run, has_monitors=False))
    assert not wants_monitors(replace(run, gone=True))


def test_a_daemon_that_the_system_no_longer_asks_for_is_wanted_no_more(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    for asks in (True, False):
        write_component_configs(SystemConfig.model_validate({"alerts": {}} if asks else {}), output)
        assert ("alerts" in wanted_daemons(output, [])) is asks
