"""Which runs get an orchestrator, and which ask for monitors or the gateway."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from daemons.decide import Daemon, State
from daemons.observe import Observer
from daemons.specs import (
    GATEWAY,
    INFERENCE,
    RunNow,
    daemon_of,
    wanted_daemons,
    wants_gateway,
    wants_monitors,
    wants_orchestrator,
    write_component_configs,
)
from daemons.supervisor import shutdown_order
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.layout import OutputDir, RunDir
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


def test_which_runs_need_the_gateway(tmp_path: Path) -> None:
    run = RunNow("run_a", in_slot=True, evicted=False, gone=False, status=None, max_steps=None, needs_gateway=True)
    assert wants_gateway(run)
    assert wants_gateway(replace(run, in_slot=False, status=status("running")))  # the trainer starts again
    for no in ({"needs_gateway": False}, {"gone": True}, {"evicted": True}, {"status": status("failed")}):
        assert not wants_gateway(replace(run, **no)), no  # type: ignore[arg-type]
    output = OutputDir(tmp_path)
    for enabled in (True, False):
        write_component_configs(SystemConfig.model_validate({"gateway": {"enabled": enabled}}), output)
        assert ("gateway" in wanted_daemons(output, [])) is enabled
        spec = wanted_daemons(output, [run])["gateway"]
        assert daemon_of(spec.argv) == (str(tmp_path), "gateway")
        daemons = [Daemon(each, State.RUNNING) for each in wanted_daemons(output, [run]).values()]
        order = [[each.spec.name for each in group] for group in shutdown_order(daemons)]
        assert order == [["run_a"], ["trainer"], ["gateway"], ["inference"]]


@pytest.mark.parametrize("needs", ["env", "eval"])
def test_a_run_needs_the_gateway_by_its_environments(needs: str, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run_a")
    run.control.mkdir(parents=True)
    agents, words = [{"id": "verifiers:some-task"}], [{"id": "reverse-text"}]
    tables = {"env": agents} if needs == "env" else {"env": words, "eval": {"env": agents}}
    observer = Observer(OutputDir(tmp_path))
    for data, found in ((tables, {GATEWAY}), ({"env": words}, set()), ({"env": 3, "eval": []}, set())):
        run.orch_toml.write_text(tomli_w.dumps(data))
        assert observer._needed(run) - {INFERENCE} == found, data


def test_a_daemon_that_the_system_no_longer_asks_for_is_wanted_no_more(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    for asks in (True, False):
        write_component_configs(SystemConfig.model_validate({"alerts": {}} if asks else {}), output)
        assert ("alerts" in wanted_daemons(output, [])) is asks
