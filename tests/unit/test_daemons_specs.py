"""Which runs get an orchestrator."""

from __future__ import annotations

from dataclasses import replace

from daemons.specs import RunNow, wants_orchestrator
from prime_rl.contract.status import RunStatus


def status(state: str, max_steps: int = 10) -> RunStatus:
    return RunStatus(run_id="run_a", state=state, max_steps=max_steps)


def test_which_runs_want_an_orchestrator() -> None:
    run = RunNow("run_a", in_slot=True, evicted=False, gone=False, status=None, max_steps=None)
    assert wants_orchestrator(run)
    assert wants_orchestrator(replace(run, status=status("evicted")))  # and evicted.txt is gone: readmitted
    assert wants_orchestrator(replace(run, status=status("finished"), max_steps=20))  # raised since
    assert not wants_orchestrator(replace(run, status=status("finished"), max_steps=10))
    assert not wants_orchestrator(replace(run, status=status("failed")))
    assert not wants_orchestrator(replace(run, in_slot=False))
    assert not wants_orchestrator(replace(run, evicted=True))
    assert not wants_orchestrator(replace(run, gone=True))
