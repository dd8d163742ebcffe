"""Pictures of `prl-tui` over a real demo: `make screenshots`, or `scripts/screenshots.py OUTPUT_DIR --dest DIR`.

Without OUTPUT_DIR it starts the demo's workspace in a temporary folder and takes the pictures while its runs train;
then a group of three nodes, of which one is killed meanwhile. The documents have NAME.svg, and NAME-small.svg of 80x24.
Every screen is also taken in 80x24 and 200x50, dark and light, into build/screenshots, to be looked at after a change.
A new screen is one line in `PICTURES`. `tour` is what is recorded: about a minute of use.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from recording import Recorder
from textual.pilot import Pilot

from daemons import actions, up_and_down
from daemons.supervisor_process import make_base_model
from daemons.workspace_reader import read_workspace
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.nodes import NodeHealth
from prime_rl.contract.status import NodeStatus, RunState, read_status
from tui.app import DARK, LIGHT, PrlApp
from tui.model.snapshot import RunRow
from tui.readers.tabs import CHAT, TABS
from tui.screens.base import WorkspaceScreen
from tui.screens.run import RunScreen

ROOT = Path(__file__).resolve().parents[1]
FOR_A_LOOK = ROOT / "build" / "screenshots"
TIMEOUT_S = 60.0
DEMO_TIMEOUT_S = 900.0
DEMO = ROOT / "configs" / "demo"
# With the tags by which they are grouped.
RUNS = {"reverse": "letters", "sort": "letters", "upper": "case"}
# More than the demo's own: they must not end before the last picture.
MAX_STEPS = 200
# The two runs in the slots have done this many steps before pictures are taken: their curves show something by then.
NUM_STEPS = 30
# After the data is there: long enough for the tab's underline to be drawn.
SETTLE_S = 0.7
PREPARE_S = 2.0
RECORDING, RECORDING_SIZE = "recording.svg", (120, 34)
NUM_NODES, VICTIM = 3, 2
# Times of the phases of two iterations are in the picture, and the victim dies while it makes rollouts of the third.
GROUP_ITERATION = 3
WAITING_S = 3.0

Open = Callable[[Pilot[None]], Awaitable[None]]


@dataclass(frozen=True)
class Look:
    """How a screen is taken: `suffix` is added to the name of its file."""

    suffix: str
    size: tuple[int, int]
    theme: str = DARK.name


DOCUMENTS = Look("", (132, 36)), Look("-small", (80, 24))
LOOKED_AT = tuple(
    Look(f"-{width}x{height}-{theme}", (width, height), theme)
    for width, height in ((80, 24), (200, 50))
    for theme in (DARK.name, LIGHT.name)
)


@dataclass(frozen=True)
class Picture:
    """A screen.

    Attributes:
        open: leads from home to what is taken.
        prepare: changes the workspace of the demo before.
        is_kept: the documents have it.
        may_act: taken of a console that is not read-only.
    """

    name: str
    open: Open
    prepare: Callable[[Path], None] | None = None
    is_kept: bool = True
    may_act: bool = False


def keys(*pressed: str) -> Open:
    async def go(pilot: Pilot[None]) -> None:
        await pilot.press(*pressed)

    return go


def run_tab(name: str) -> Open:
    """That tab of the run with most steps among those that train."""

    async def go(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, PrlApp) and isinstance(app.screen, WorkspaceScreen) and app.screen.snapshot is not None
        app.call_next(app.open_run, choose(app.screen.snapshot.rows).run_id)
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and app.screen.can_show, "the run screen")
        screen = app.screen
        assert isinstance(screen, RunScreen)
        await pilot.press(str((*TABS, CHAT).index(name) + 1))
        if name != CHAT:
            await until(pilot, lambda: name in screen.shown, f"the tab {name}")

    return go


def trouble(output_dir: Path) -> None:
    """Something that needs a person: a config with a mistake, and a run that was evicted."""
    make_mistake(output_dir)
    for run in read_workspace(output_dir).runs:
        if run.state == "active":
            actions.evict_run(output_dir, run.run_id, "the reward does not improve")
            return


async def a_node_dies(pilot: Pilot[None]) -> None:
    """The screen of nodes, some seconds after one was killed: the others wait and do not give up yet."""
    app = pilot.app
    assert isinstance(app, PrlApp)
    output = OutputDir(app.setting.output_dir)

    def words() -> dict[int, str]:
        group = app.screen.snapshot.group if isinstance(app.screen, WorkspaceScreen) and app.screen.snapshot else None
        return {row.rank: row.health for row in group.rows} if group else {}

    await pilot.press("4")
    await until(pilot, lambda: set(words().values()) == {NodeHealth.ALIVE}, "three living nodes")
    status = read_status(output.node_status(VICTIM), NodeStatus)
    assert status is not None
    os.kill(status.pid, signal.SIGKILL)
    await until(pilot, lambda: words()[VICTIM] == NodeHealth.DEAD, "the death of one")
    await pilot.pause(WAITING_S)


NODES = Picture("nodes", keys("4"))
NODES_OF_OURS = Picture("nodes", a_node_dies)
PROBLEMS = Picture("problems", keys("5"), prepare=trouble)
PICTURES = (
    Picture("home", keys()),
    Picture("run", run_tab("charts")),
    Picture("system", keys("3")),
    Picture("rollouts", run_tab("rollouts")),
    Picture("compare", keys("6")),
    Picture("groups", keys("6", "b", *"tag", "enter"), is_kept=False),
    Picture("config", run_tab("config"), is_kept=False),
    Picture("events", run_tab("events"), is_kept=False),
    Picture("chat", run_tab(CHAT), is_kept=False, may_act=True),
    Picture("sweep", keys("W"), is_kept=False, may_act=True),
)


def choose(rows: tuple[RunRow, ...]) -> RunRow:
    return max(rows, key=lambda row: (row.state == "active", row.step))


async def until(pilot: Pilot[None], condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out after {TIMEOUT_S:g} s waiting for {what}")
        await pilot.pause(0.05)


async def take(output_dir: Path, dest: Path, picture: Picture) -> list[Path]:
    """In all sizes; `dest` gets what the documents have."""
    app = PrlApp(output_dir, read_only=not picture.may_act)
    app.animation_level = "none"

    def has_looked() -> bool:
        snapshot = getattr(app.screen, "snapshot", None)
        return snapshot is not None and (not snapshot.rows or any(row.tail.rewards for row in snapshot.rows))

    taken = []
    looks = [(look, dest) for look in DOCUMENTS if picture.is_kept] + [(look, FOR_A_LOOK) for look in LOOKED_AT]
    async with app.run_test(size=looks[0][0].size) as pilot:
        await until(pilot, has_looked, "a look at the workspace")
        await picture.open(pilot)
        for look, folder in looks:
            app.theme = app.shown_theme(look.theme)
            await pilot.resize_terminal(*look.size)
            await pilot.pause(SETTLE_S)
            taken.append(Path(app.save_screenshot(f"{picture.name}{look.suffix}.svg", path=str(folder))))
    return taken


def make_mistake(output_dir: Path) -> None:
    """A run with a mistake in its config."""
    broken = OutputDir(output_dir).run("run_typo")
    broken.control.mkdir(parents=True, exist_ok=True)
    broken.orch_toml.write_text('batch_size = 64\nrollouts_per_example = 8\n[optim]\nlr = "fast"\n', encoding="utf-8")


async def tour(pilot: Pilot[None], recorder: Recorder, output_dir: Path) -> None:
    """Home, a run's charts and rollouts, the runs compared, a mistake, a pause."""
    app = pilot.app
    assert isinstance(app, PrlApp)

    async def open_run() -> None:
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and app.screen.can_show, "the run screen")

    async def pause() -> None:
        """By its key where there is one, else as `prl runs pause` does."""
        assert isinstance(app.screen, WorkspaceScreen) and app.screen.snapshot is not None
        run_id = app.screen.snapshot.rows[0].run_id
        if any(active.binding.action == "pause" for active in app.screen.active_bindings.values()):
            await pilot.press("z")
            await recorder.watch(SETTLE_S)
            await pilot.press("enter")
        else:
            await asyncio.to_thread(actions.pause_run, output_dir, run_id)

        def is_paused() -> bool:
            run = read_workspace(output_dir).run(run_id)
            return run is not None and run.state is RunState.PAUSED

        await until(pilot, is_paused, f"the pause of {run_id}")

    await recorder.watch(4.0)
    await recorder.press("j: the next run", "j")
    await recorder.press("k: back", "k")
    await recorder.do("enter: open the run: its charts", open_run, 5.0)
    await recorder.press("2: its rollouts", str(TABS.index("rollouts") + 1), watch_s=3.0)
    for _ in range(3):
        await recorder.press("j: the next rollout", "j")
    await recorder.press("esc: home", "escape")
    await recorder.press("6: compare", "6", watch_s=4.0)
    await recorder.press("b: group by", "b")
    await recorder.press("group by tag", *"tag", watch_s=2.0)
    await recorder.press("enter: mean and spread of each group", "enter", watch_s=5.0)
    make_mistake(output_dir)
    await recorder.press("5: problems", "5", watch_s=5.0)
    await recorder.press("1: home", "1", watch_s=2.0)
    await recorder.press("g: the first run", "g")
    await recorder.do("pause: the run is saved and leaves its slot", pause, 2.0)
    await recorder.press("the run that waited takes it", watch_s=6.0)


async def record(output_dir: Path, dest: Path) -> Path:
    app = PrlApp(output_dir)
    app.animation_level = "none"
    async with app.run_test(size=RECORDING_SIZE) as pilot:
        await until(pilot, lambda: bool(getattr(app.screen, "snapshot", None)), "a look at the workspace")
        recorder = Recorder(pilot)
        await tour(pilot, recorder, output_dir)
        return recorder.save(dest / RECORDING, RECORDING_SIZE)


@contextmanager
def demo() -> Iterator[Path]:
    """The output directory of the demo's workspace while it trains; it is stopped afterwards."""
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="prl-screenshots-") as folder:
        place = Path(folder) / "demo"
        system = up_and_down.choose_system(["@", str(DEMO / "system.toml")], place, say=print)
        make_base_model(system.system.model.name, lambda: False, print)
        try:
            up_and_down.start_workspace(system, stop=lambda: False, say=print, on_look=lambda workspace: None)
            for name, tag in RUNS.items():
                actions.add_run(place, DEMO / f"{name}.toml", overrides={"max_steps": MAX_STEPS, "tags": [tag]})

            def trains() -> bool:
                return sum(run.step >= NUM_STEPS for run in read_workspace(place).runs) >= 2

            wait_for(trains, f"two runs of the demo at step {NUM_STEPS}", timeout_s=DEMO_TIMEOUT_S, poll_s=0.5)
            yield place
        finally:
            up_and_down.stop_workspace(place, say=print)


@contextmanager
def group() -> Iterator[Path]:
    """The output directory of a group of nodes in its third iteration; they are stopped afterwards."""
    os.chdir(ROOT)
    make_base_model("models/base", lambda: False, print)
    with tempfile.TemporaryDirectory(prefix="prl-screenshots-") as folder:
        place = OutputDir(Path(folder) / "group")
        command = [str(Path(sys.executable).with_name("prl")), "multinode", "--data-path", ".", "--log-path"]
        flags = f"--num-nodes {NUM_NODES} --rank-weights 2,1,1 --eval-interval 2 @ configs/multinode/demo.toml".split()
        nodes = []
        with (Path(folder) / "nodes.log").open("wb") as log:
            for rank in range(NUM_NODES):
                who = ["--worker", str(rank)] if rank else ["--master"]
                argv = [*command, str(place.path), *who, *flags]
                nodes.append(subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT))

        def is_there() -> bool:
            status = read_status(place.node_status(VICTIM), NodeStatus)
            return status is not None and (status.iteration, status.phase) >= (GROUP_ITERATION, 2)

        try:
            wait_for(is_there, f"iteration {GROUP_ITERATION} of the group", timeout_s=DEMO_TIMEOUT_S, poll_s=0.2)
            yield place.path
        finally:
            for node in nodes:
                node.send_signal(signal.SIGINT)
            for node in nodes:
                node.wait(TIMEOUT_S)


def take_all(output_dir: Path, dest: Path, pictures: Iterable[Picture], *, is_ours: bool) -> None:
    for picture in pictures:
        if is_ours and picture.prepare is not None:
            picture.prepare(output_dir)
            time.sleep(PREPARE_S)
        print(*asyncio.run(take(output_dir, dest, picture)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Pictures of prl-tui, of a workspace or of a demo that is run for them."
    )
    parser.add_argument("output_dir", nargs="?", type=Path)
    parser.add_argument("--dest", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--only", choices=("demo", "group"), help="the pictures of one workspace only")
    args = parser.parse_args()
    for folder in (args.dest, FOR_A_LOOK):
        folder.mkdir(parents=True, exist_ok=True)
    if args.output_dir is None:
        if args.only != "group":
            with demo() as place:
                take_all(place, args.dest, PICTURES, is_ours=True)
                print(asyncio.run(record(place, args.dest)))
                take_all(place, args.dest, [PROBLEMS], is_ours=True)
        if args.only != "demo":
            with group() as place:
                take_all(place, args.dest, [NODES_OF_OURS], is_ours=True)
        return 0
    if not args.output_dir.is_dir():
        print(f"screenshots: no folder {args.output_dir}", file=sys.stderr)
        return 2
    take_all(args.output_dir, args.dest, [*PICTURES, PROBLEMS, NODES], is_ours=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
