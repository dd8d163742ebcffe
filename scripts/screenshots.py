"""Pictures of `prl-tui` over a real demo: `make screenshots`, or `scripts/screenshots.py OUTPUT_DIR --dest DIR`.

Without OUTPUT_DIR it starts the demo's house in a temporary folder and takes the pictures while its runs train. Every
screen is taken read-only and in two sizes: NAME.svg for the documents, and NAME-small.svg of 80x24. A new screen is one
line in `PICTURES`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from textual.pilot import Pilot

from daemons import actions, running
from daemons.base_model import make_base_model
from daemons.client import read_house
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from tui.app import PrlApp
from tui.screens.base import HouseScreen
from tui.screens.run import RunScreen
from tui.snapshot import RunRow
from tui.tabs import TABS

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"": (132, 36), "-small": (80, 24)}
TIMEOUT_S = 60.0
DEMO_TIMEOUT_S = 900.0
DEMO = ROOT / "configs" / "demo"
RUNS = ("reverse", "sort", "upper")
# More than the demo's own: they must not end before the last picture.
MAX_STEPS = 200
# The two runs in the slots have done this many steps before pictures are taken: their curves show something by then.
NUM_STEPS = 30
# After the data is there: long enough for the tab's underline to be drawn.
SETTLE_S = 0.7
PREPARE_S = 2.0

Open = Callable[[Pilot[None]], Awaitable[None]]


@dataclass(frozen=True)
class Picture:
    """`open` leads from home to what is taken; `prepare` changes the house of the demo before."""

    name: str
    open: Open
    prepare: Callable[[Path], None] | None = None


def keys(*pressed: str) -> Open:
    async def go(pilot: Pilot[None]) -> None:
        await pilot.press(*pressed)

    return go


def run_tab(name: str) -> Open:
    """That tab of the run with most steps among those that train."""

    async def go(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, PrlApp) and isinstance(app.screen, HouseScreen) and app.screen.snapshot is not None
        app.call_next(app.open_run, choose(app.screen.snapshot.rows).run_id)
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and app.screen.can_show, "the run screen")
        screen = app.screen
        assert isinstance(screen, RunScreen)
        await pilot.press(str(TABS.index(name) + 1))
        await until(pilot, lambda: name in screen.shown, f"the tab {name}")

    return go


def trouble(output_dir: Path) -> None:
    """Something that needs a person: a config with a mistake, and a run that was evicted."""
    broken = OutputDir(output_dir).run("run_typo")
    broken.control.mkdir(parents=True, exist_ok=True)
    broken.orch_toml.write_text('batch_size = 64\nrollouts_per_example = 8\n[optim]\nlr = "fast"\n')
    for run in read_house(output_dir).runs:
        if run.state == "active":
            actions.evict_run(output_dir, run.run_id, "the reward does not improve")
            return


PICTURES = (
    Picture("home", keys()),
    Picture("run", run_tab("charts")),
    Picture("problems", keys("5"), prepare=trouble),
    Picture("system", keys("3")),
    Picture("rollouts", run_tab("rollouts")),
    Picture("nodes", keys("4")),
)


def choose(rows: tuple[RunRow, ...]) -> RunRow:
    return max(rows, key=lambda row: (row.state == "active", row.step))


async def until(pilot: Pilot[None], condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {TIMEOUT_S:g} s in vain for {what}")
        await pilot.pause(0.05)


async def take(output_dir: Path, dest: Path, picture: Picture, suffix: str, size: tuple[int, int]) -> Path:
    app = PrlApp(output_dir, read_only=True)
    app.animation_level = "none"

    def has_looked() -> bool:
        snapshot = getattr(app.screen, "snapshot", None)
        return snapshot is not None and (not snapshot.rows or any(row.tail.rewards for row in snapshot.rows))

    async with app.run_test(size=size) as pilot:
        await until(pilot, has_looked, "a look at the house")
        await picture.open(pilot)
        await pilot.pause(SETTLE_S)
        return Path(app.save_screenshot(f"{picture.name}{suffix}.svg", path=str(dest)))


@contextmanager
def demo() -> Iterator[Path]:
    """The output directory of the demo's house while it trains; it is stopped afterwards."""
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="prl-screenshots-") as folder:
        place = Path(folder) / "demo"
        system = running.choose_system(["@", str(DEMO / "system.toml")], place, say=print)
        make_base_model(system.system.model.name, lambda: False, print)
        try:
            running.start_house(system, stop=lambda: False, say=print, on_look=lambda house: None)
            for name in RUNS:
                actions.add_run(place, DEMO / f"{name}.toml", overrides={"max_steps": MAX_STEPS})

            def trains() -> bool:
                return sum(run.step >= NUM_STEPS for run in read_house(place).runs) >= 2

            wait_for(trains, f"two runs of the demo at step {NUM_STEPS}", timeout_s=DEMO_TIMEOUT_S, poll_s=0.5)
            yield place
        finally:
            running.stop_house(place, say=print)


def take_all(output_dir: Path, dest: Path, *, is_ours: bool) -> None:
    for picture in PICTURES:
        if is_ours and picture.prepare is not None:
            picture.prepare(output_dir)
            time.sleep(PREPARE_S)
        for suffix, size in SIZES.items():
            print(asyncio.run(take(output_dir, dest, picture, suffix, size)))


def main() -> int:
    parser = argparse.ArgumentParser(description="Pictures of prl-tui, of a house or of a demo that is run for them.")
    parser.add_argument("output_dir", nargs="?", type=Path)
    parser.add_argument("--dest", type=Path, default=ROOT / "docs" / "images")
    args = parser.parse_args()
    args.dest.mkdir(parents=True, exist_ok=True)
    if args.output_dir is None:
        with demo() as place:
            take_all(place, args.dest, is_ours=True)
        return 0
    if not args.output_dir.is_dir():
        print(f"screenshots: no folder {args.output_dir}", file=sys.stderr)
        return 2
    take_all(args.output_dir, args.dest, is_ours=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
