"""Pictures of the forms that act on runs, in a small and a large terminal, and of runs that are paused or budgeted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static, TextArea

from prime_rl.contract.layout import OutputDir
from tests.budgets import in_full
from tests.snapshots.test_tui_snapshots import LARGE, SMALL, Compare, looked
from tests.tui_pilot import PatientPilot
from tests.tui_support import build_workspace, frozen_clock, orch_toml, roomy_disk, screen_text, settled, until
from tests.unit.test_daemons_forks import put_adapter
from tui.app import PrlApp
from tui.dialogs.form import FormDialog
from tui.widgets.runs_table import RunsTable

DONE, QUEUED = "run_done", "run_queued-a"
SIZES = pytest.mark.parametrize("size", [SMALL, *in_full((LARGE,))], ids=["80x24", "200x50"])
Fill = Callable[[FormDialog], None]


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrlApp:
    """Started in the workspace's own parent, so that no picture holds a path of this machine."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("PRL_OUTPUT_DIR", "lab")
    monkeypatch.chdir(tmp_path)
    output = build_workspace(Path("lab"))
    put_adapter(output.run(DONE).broadcast_dir(60))
    _share(output)
    app = PrlApp(Path("lab"), clock=frozen_clock, read_disk=roomy_disk)
    app.animation_level = "none"
    return app


def _share(output: OutputDir) -> None:
    """One run is paused, one was preempted, one has used up its budget, one has used half of it."""
    output.run("run_queued-b").paused.write_text("the short ones first")
    output.run(QUEUED).preempted.write_text("preempted by run_upper (priority 9)")
    output.run("run_collapsed").evicted.unlink()
    output.run("run_collapsed").finished.write_text("budget used up: 2,000,000 of 2,000,000 tokens")
    for run_id, extra in (
        ("run_sort-rank16", "weight = 2\nbudget = { max_tokens = 2000000 }\n"),
        (QUEUED, "priority = 3"),
    ):
        run = output.run(run_id)
        run.orch_toml.write_text(orch_toml(extra=extra))
        run.life.write_text("one")
    output.usage.mkdir()
    line = '{"version":1,"run_id":"run_sort-rank16","day":"2026-09-21","life":"one","tokens":1000000,"work_s":5400}\n'
    output.run_usage("run_sort-rank16").write_text(line)


def in_form(run_id: str, key: str, fill: Fill, field: str, words: str) -> Callable[[Pilot[None]], Awaitable[None]]:
    """Open a form on a run, fill it in, wait for what the check says at `field`."""

    async def run(pilot: Pilot[None]) -> None:
        await looked()(pilot)
        pilot = PatientPilot(pilot.app)
        table = pilot.app.screen.query_one(RunsTable)
        table.move_cursor(row=table.run_ids.index(run_id))
        ends = ("q Quit", "z Pause")  # the keys at the foot are cut after the rest is drawn
        await until(pilot, lambda: screen_text(pilot.app).rstrip().endswith(ends), "the keys")
        await pilot.press(key)
        await until(pilot, lambda: isinstance(pilot.app.screen, FormDialog), "the form")
        dialog = pilot.app.screen
        assert isinstance(dialog, FormDialog)
        await until(pilot, lambda: dialog.is_checked, "the check of the empty form")
        before = dialog._serial_of_form
        fill(dialog)
        await until(pilot, lambda: dialog._serial_of_form > before, "the change")
        for each in dialog.query(Input):
            each.cursor_blink = False
        for area in dialog.query(TextArea):
            area.cursor_blink = False
        said = dialog.query_one(f"#{field}", Static)
        await until(pilot, lambda: dialog.is_checked and words in str(said.render()), words)
        await settled(pilot)

    return run


def _put(name: str, value: str) -> Fill:
    def fill(dialog: FormDialog) -> None:
        dialog.query_one(f"#{name}", Input).value = value

    return fill


def _grid(dialog: FormDialog) -> None:
    dialog.query_one("#axes", TextArea).load_text("optim.lr=1e-4,3e-4\nseed=1,2,3")
    dialog.query_one("#halving", Input).value = "3"


FORMS = {
    "pause": (QUEUED, "z", _put("reason", "the short ones first"), "check", "z continues"),
    "weight": (QUEUED, "w", _put("weight", "-2"), "problem-weight", "greater than 0"),
    "budget": ("run_sort-rank16", "B", _put("tokens", "900000"), "check", "would end at once"),
    "fork": (DONE, "F", _put("settings", "optim.lr=3e-5 seed=2"), "check", "would start"),
    "fork-refused": (DONE, "F", _put("version", "7"), "problem-version", "of step 7"),
    "export-refused": (DONE, "E", _put("version", "7"), "problem-version", "of step 7"),
    "sweep": (QUEUED, "W", _grid, "check", "6 runs, of 3"),
}


# The others are opened, filled and sent by tests/integration/test_tui_steering.py.
PICTURED = ("budget", "fork-refused", "sweep")


@pytest.mark.parametrize(
    ("form", "size"),
    [
        *((form, SMALL) for form in PICTURED),
        *in_full(*((form, SMALL) for form in FORMS if form not in PICTURED), *((form, LARGE) for form in PICTURED)),
    ],
    ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value)),
)
def test_form(snap_compare: Compare, app: PrlApp, form: str, size: tuple[int, int]) -> None:
    assert snap_compare(app, terminal_size=size, run_before=in_form(*FORMS[form]))


@SIZES
def test_runs_that_share(snap_compare: Compare, app: PrlApp, size: tuple[int, int]) -> None:
    async def steps(pilot: Pilot[None]) -> None:
        await looked()(pilot)
        pilot = PatientPilot(pilot.app)
        table = pilot.app.screen.query_one(RunsTable)
        table.move_cursor(row=table.run_ids.index("run_sort-rank16"))
        await settled(pilot)

    assert snap_compare(app, terminal_size=size, run_before=steps)
