"""A run whose requests end inference is evicted with the reason; its neighbours train to their last step.

The test is the fault: it kills the server whenever that works for the run, as the kernel does when memory runs out.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.contract.layout import list_steps
from prime_rl.contract.notes import read_work
from prime_rl.contract.status import DaemonStatus, read_status
from tests.system_support import Workspace, closed, make_workspace

GOOD, BAD, NUM_STEPS = ("run_a", "run_b"), "run_bad", 40


class Fault:
    """Ends the server whose note names the run, twice, while nothing else can come into the note."""

    def __init__(self, workspace: Workspace) -> None:
        self._path = workspace.paths.replica_work(0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.ended: list[list[str]] = []
        self._pids: set[int] = set()

    def __enter__(self) -> Fault:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _runs(self) -> tuple[int, set[str]]:
        work = read_work(self._path)
        if work is None or work.writer.pid in self._pids or not work.writer.is_running():
            return 0, set()
        # Beside a suspect the note has what ended a moment ago of those that were cleared.
        return work.writer.pid, {item.run_id for item in work.suspected or work.items}

    def _work(self) -> None:
        while len(self.ended) < 2 and not self._stop.wait(0.005):
            pid, runs = self._runs()
            if BAD not in runs or (not self.ended and len(runs) == 1):
                continue  # at first it is not alone in work
            os.kill(pid, signal.SIGSTOP)
            _, runs = self._runs()
            if BAD in runs:
                os.kill(pid, signal.SIGKILL)
                self._pids.add(pid)
                self.ended.append(sorted(runs))
            else:
                os.kill(pid, signal.SIGCONT)


@pytest.fixture
def three(tmp_path: Path, untaught_model: Path) -> Iterator[Workspace]:
    yield from closed(make_workspace(tmp_path, untaught_model, slots=3))


@pytest.mark.release
def test_a_run_that_ends_inference_twice_is_evicted_and_its_neighbours_train_on(three: Workspace) -> None:
    for run_id in (*GOOD, BAD):  # before the start: they begin together
        steps = NUM_STEPS if run_id in GOOD else 10_000
        source = three.write_run(run_id.removeprefix("run_"), max_steps=steps)
        three.prl("runs", "add", str(source))
    three.up()
    with Fault(three) as fault:
        three.wait(lambda: three.state(BAD) == "evicted", "the run that ends inference to be evicted")
        three.wait(lambda: {three.state(run_id) for run_id in GOOD} == {"finished"}, "its neighbours to finish")
    first, last = map(set, fault.ended)
    assert len(first) > 1 and first & last == {BAD}, "of those that were in work at first, it was alone at last"
    reason = three.run_dir(BAD).evicted.read_text()
    what = rf"(loaded|served) ({BAD}@v\d+|the base model for {BAD})"
    assert re.fullmatch(rf"inference ended twice while it {what}, last: killed by signal 9", reason)
    for run_id in GOOD:
        run = three.run_dir(run_id)
        assert list_steps(run.broadcast, stable_only=True)[-1] == NUM_STEPS and not run.evicted.exists()
    status = read_status(three.paths.daemon_status("inference"), DaemonStatus)
    assert status is not None and (status.state, status.num_restarts) == ("running", 2)
    assert len(status.crashes) == 2 and BAD in status.crashes[-1].reason
    shown = " ".join(three.prl("runs", "show", BAD).stdout.split())
    assert reason[:60] in shown
