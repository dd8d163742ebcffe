"""Pictures of the TUI over a real output directory: `python scripts/screenshots.py OUTPUT_DIR DEST`.

Writes home.svg, run.svg and config.svg at 120x32 into DEST, read-only. The run is the first active one, else the one
with most steps.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

from textual.pilot import Pilot

from tui.app import PrlApp
from tui.screens.run import RunScreen
from tui.screens.runs import RunsScreen
from tui.snapshot import RunRow
from tui.widgets.chart import Chart

SIZE = (120, 32)
TIMEOUT_S = 30.0
# After the data is there: long enough for the tab's underline and the toasts to be drawn.
SETTLE_S = 1.0


async def until(pilot: Pilot[None], condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {TIMEOUT_S:g} s in vain for {what}")
        await pilot.pause(0.05)


def choose(rows: tuple[RunRow, ...]) -> RunRow:
    return max(rows, key=lambda row: (row.state == "active", row.step))


async def take(output_dir: Path, dest: Path) -> list[Path]:
    app = PrlApp(output_dir, read_only=True)
    saved = []

    def save(name: str) -> None:
        saved.append(Path(app.save_screenshot(f"{name}.svg", path=str(dest))))

    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: getattr(app.screen, "snapshot", None) is not None, "a look at the house")
        await pilot.pause(SETTLE_S)
        home = app.screen
        assert isinstance(home, RunsScreen) and home.snapshot is not None
        save("home")
        if not home.snapshot.rows:
            return saved
        app.call_next(home.open_run, choose(home.snapshot.rows).run_id)
        await until(pilot, lambda: isinstance(app.screen, RunScreen), "the run screen")
        await until(pilot, lambda: any(chart.has_class("-drawn") for chart in app.screen.query(Chart)), "a curve")
        await pilot.pause(SETTLE_S)
        save("run")
        await pilot.press("2")
        await pilot.pause(SETTLE_S)
        save("config")
    return saved


def main() -> int:
    parser = argparse.ArgumentParser(description="Pictures of the TUI over a real output directory.")
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("dest", type=Path)
    args = parser.parse_args()
    if not args.output_dir.is_dir():
        print(f"screenshots: no folder {args.output_dir}", file=sys.stderr)
        return 2
    args.dest.mkdir(parents=True, exist_ok=True)
    for path in asyncio.run(take(args.output_dir, args.dest)):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
