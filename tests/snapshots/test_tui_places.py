"""Pictures of System, Nodes and Problems: small and large, dark and light, with frozen clocks and a fixed machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from prime_rl.contract.layout import OutputDir
from prime_rl.contract.nodes import NodeHealth
from tests.snapshots.test_tui_snapshots import LOOKS, Compare
from tests.tui_pilot import PatientPilot
from tests.tui_places_support import FakeProbe, busy, put_group, put_sweep
from tests.tui_support import (
    Ticker,
    build_workspace,
    command,
    frozen_clock,
    has_looked,
    roomy_disk,
    screen_text,
    settled,
    until,
)
from tui.app import PrlApp
from tui.screens.base import WorkspaceScreen


def dead_nodes(app: PrlApp) -> list[int]:
    """Their ranks. A look between the writes of two nodes finds more of them dead than there are."""
    screen = app.screen
    assert isinstance(screen, WorkspaceScreen) and screen.snapshot is not None and screen.snapshot.group is not None
    return [row.rank for row in screen.snapshot.group.rows if row.health == NodeHealth.DEAD]


@LOOKS
@pytest.mark.parametrize(
    ("key", "words"),
    [("3", "87 %"), ("4", "node 3 is dead"), ("5", "dead: no heartbeat"), ("6", "★")],
    ids=["system", "nodes", "problems", "compare"],
)
def test_place(
    snap_compare: Compare,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    words: str,
    size: tuple[int, int],
    theme: str,
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    output, clock = build_workspace(tmp_path / "lab"), Ticker()
    busy(output)
    put_group(output, seq=100)
    app = PrlApp(
        output.path,
        clock=frozen_clock,
        read_disk=roomy_disk,
        monotonic=clock,
        make_probe=lambda path: FakeProbe(),
    )
    app.animation_level = "none"

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: has_looked(app), "a look")
        app.theme = theme
        clock.now += 16
        put_group(output, seq=101)
        app.watcher.wake()
        await until(pilot, lambda: dead_nodes(app) == [3], "a look at all files of the nodes")
        await until(pilot, lambda: "9 problems" in screen_text(app), "the dead node among the problems")
        await pilot.press(key)
        await until(pilot, lambda: words in screen_text(app), words)
        await settled(pilot)

    assert snap_compare(app, terminal_size=size, run_before=steps)


@pytest.mark.parametrize(
    ("key", "then", "words"),
    [(None, "", "lr2e-3-seed3"), ("6", "group optim.lr", "± 0.0")],
    ids=["runs", "groups"],
)
def test_a_sweep_of_two_values_with_three_seeds_each(
    snap_compare: Compare, tmp_path: Path, key: str | None, then: str, words: str
) -> None:
    """In the runs table, and compared by the value: the deviation of the seeds is thinner than a character."""
    put_sweep(OutputDir(tmp_path / "lab"))
    app = PrlApp(tmp_path / "lab", clock=frozen_clock, read_disk=roomy_disk)
    app.animation_level = "none"

    async def steps(pilot: Pilot[None]) -> None:
        patient = PatientPilot(app)
        await until(patient, lambda: has_looked(app), "a look")
        if key is not None:
            await patient.press(key)
            await until(patient, lambda: "★" in screen_text(app), "the runs compared")
            await command(patient, then)
        await until(patient, lambda: words in screen_text(app), words)
        await settled(patient)

    assert snap_compare(app, terminal_size=(80, 24), run_before=steps)
