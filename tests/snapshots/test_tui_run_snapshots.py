"""Pictures of the run screen's tabs, dark and light, small and large, with a frozen clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from prime_rl.contract.layout import RunDir
from tests.budgets import in_full
from tests.rollouts_support import add_batches, add_branches
from tests.snapshots.test_tui_snapshots import LARGE, LOOKS, SMALL, Compare, Steps
from tests.tui_run_support import RUN
from tests.tui_support import add_history, build_workspace, frozen_clock, has_looked, roomy_disk, settled, until
from tui.app import PrlApp
from tui.readers.tabs import CHARTS, CONFIG, EVENTS, LOGS, ROLLOUTS, TABS
from tui.screens.run import RunScreen


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrlApp:
    monkeypatch.setenv("TZ", "UTC")
    workspace = build_workspace(tmp_path / "lab")
    for run_id in ("run_typo", RUN):
        add_history(workspace, run_id)
    app = PrlApp(tmp_path / "lab", clock=frozen_clock, read_disk=roomy_disk)
    app.animation_level = "none"
    return app


def opened(tab: str, *keys: str, run_id: str = RUN, theme: str | None = None) -> Steps:
    """Open a run at a tab, wait until it shows its files, press `keys`."""

    async def run(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, PrlApp)
        await until(pilot, lambda: has_looked(app), "a look")
        if theme:
            app.theme = theme
        app.call_next(app.open_run, run_id)
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and CHARTS in app.screen.shown, "the charts")
        screen = app.screen
        assert isinstance(screen, RunScreen)
        await pilot.press(str(TABS.index(tab) + 1))
        await until(pilot, lambda: tab in screen.shown, f"the tab {tab}")
        for key in keys:
            await pilot.press(key)
            await settled(pilot, num_same=2)
        await settled(pilot)

    return run


@LOOKS
# The others are read, with all that is on them, in tests/integration/test_tui_run.py and test_tui_run_log.py.
@pytest.mark.parametrize("tab", [CHARTS, ROLLOUTS, *in_full(*(tab for tab in TABS if tab not in (CHARTS, ROLLOUTS)))])
def test_tab(snap_compare: Compare, app: PrlApp, size: tuple[int, int], tab: str, theme: str) -> None:
    assert snap_compare(app, terminal_size=size, run_before=opened(tab, theme=theme))


@pytest.mark.parametrize(
    ("tab", "keys"),
    [
        *in_full((CHARTS, ("m", "s", "s", "left", "left", "left"))),
        *in_full((CHARTS, ("w", *"sort", "tab", "enter", "space", "space"))),
        *in_full((ROLLOUTS, ("n",)), (CONFIG, ("v",)), (CONFIG, ("w", *"upper", "enter"))),
        *in_full((LOGS, ("v", "v", "slash", *"client", "enter"))),
    ],
    ids=["one-chart", "compared", "turns", "defaults", "differences", "warnings"],
)
def test_small(snap_compare: Compare, app: PrlApp, tab: str, keys: tuple[str, ...]) -> None:
    assert snap_compare(app, terminal_size=SMALL, run_before=opened(tab, *keys))


GROUP = ("v", "n", "t", "t")


@pytest.mark.parametrize(
    ("keys", "size"),
    [
        (GROUP, SMALL),
        *in_full(
            (GROUP, LARGE),
            (("slash", *"again reward>0.5", "enter", "v", "t"), SMALL),
            (("v", "v", "less_than_sign"), SMALL),
        ),
    ],
    ids=["group-80x24", "group-200x50", "found-80x24", "rewards-80x24"],
)
def test_rollouts_with_their_tokens(
    snap_compare: Compare, app: PrlApp, size: tuple[int, int], keys: tuple[str, ...]
) -> None:
    run_id = "run_sort-rank16"
    add_batches(RunDir(app.setting.output_dir / run_id), 30)
    assert snap_compare(app, terminal_size=size, run_before=opened(ROLLOUTS, *keys, run_id=run_id))


def test_the_branches_of_a_rollout(snap_compare: Compare, app: PrlApp) -> None:
    run_id = "run_sort-rank16"
    run = RunDir(app.setting.output_dir / run_id)
    add_batches(run, 3)
    add_branches(run, 4)
    assert snap_compare(app, terminal_size=SMALL, run_before=opened(ROLLOUTS, "n", "n", run_id=run_id))


@pytest.mark.slow
def test_an_invalid_config(snap_compare: Compare, app: PrlApp) -> None:
    assert snap_compare(app, terminal_size=SMALL, run_before=opened(CONFIG, run_id="run_typo"))


@pytest.mark.slow
def test_events_of_an_evicted_run(snap_compare: Compare, app: PrlApp) -> None:
    assert snap_compare(app, terminal_size=SMALL, run_before=opened(EVENTS, run_id="run_collapsed"))
