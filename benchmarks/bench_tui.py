"""`prl-tui` in a pseudo terminal, and `wandb leet` beside it on the same numbers: what one waits for, what it takes.

Both are started as people start them, and timed by what is on the screen (`tui_terminal`). The clock begins before the
process is made. Not measured of leet: what it has no counterpart for. `ratio_NAME` is ours divided by leet's, of one
run of this benchmark: below 1 is better. Everything but the long chart is taken twice, in a small and in a large
workspace (`_5000`).
"""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.tui_leet import WandbLog, history_record, make_runs, two_figures
from benchmarks.tui_terminal import Screen, Terminal
from benchmarks.tui_workspace import BenchWorkspace, append, long_run_line, orchestrator_line, ten_metrics

NUM_STEPS = 2000
LONG_STEPS = 100_000
NUM_STARTS, NUM_KEYS, NUM_LINES = 5, 150, 8
# Both read all runs in the background, and are idle then.
READING_S, IDLE_S = 20.0, 20.0
Figures = dict[str, float]


@dataclass(frozen=True)
class Scale:
    """How many runs there are, how many of them are in slots, and what the names of the figures end in."""

    num_runs: int
    num_live: int
    suffix: str = ""


SCALES = (Scale(1000, 100), Scale(5000, 500, "_5000"))


def run() -> Figures:
    leet = shutil.which("wandb", path=str(Path(sys.executable).parent))
    figures: Figures = {}
    for scale in SCALES:
        with bench_folder() as folder:
            found = with_ratios(ours(folder / "workspace", scale), leets(leet, folder, scale) if leet else {})
        figures |= {f"{name}{scale.suffix}": value for name, value in found.items()}
    with bench_folder() as folder:
        long = {"charts_100k_s": our_charts(folder / "long")}
        figures |= with_ratios(long, leets_charts(leet, folder) if leet else {})
    return figures


def with_ratios(found: Figures, others: Figures) -> Figures:
    """Ours, leet's, and each ratio of the two."""
    ratios = {f"ratio_{ratio_name(name)}": found[name] / value for name, value in others.items() if value}
    return found | {f"leet_{name}": value for name, value in others.items()} | ratios


def ratio_name(name: str) -> str:
    """Without the unit."""
    return name.rpartition("_")[0] if name.endswith(("_s", "_ms", "_mb")) else name


@contextmanager
def bench_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="bench-tui-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def ours(path: Path, scale: Scale) -> Figures:
    workspace = BenchWorkspace(path, num_runs=scale.num_runs, num_steps=NUM_STEPS, num_live=scale.num_live)
    command = [sys.executable, "-m", "tui", str(path)]
    os.environ["XDG_STATE_HOME"] = str(path.parent / "state")
    figures: Figures = {}
    with going(workspace.beat, every_s=5.0):
        figures["first_paint_s"] = median_start(command, _shows_live_row)
        with Terminal(command) as terminal:
            terminal.wait(_shows_live_row, "the first live row")
            terminal.drain(READING_S)
            figures["idle_cpu"] = cpu_share(terminal)
            figures["rss_mb"] = rss_mb(terminal)
            values = [(0.111 + 0.1 * number, f"{0.111 + 0.1 * number:.3f}") for number in range(NUM_LINES)]
            metrics = workspace.run(3).orchestrator_metrics
            figures["metric_to_screen_s"] = line_to_screen(
                terminal, values, lambda step, value: append(metrics, orchestrator_line(step, value))
            )
    with going(workspace.step_all, every_s=1.0), Terminal(command) as terminal:
        terminal.wait(_shows_curve, "the first live row")
        terminal.drain(4.0)
        figures["key_p95_ms"] = key_p95_ms(terminal, down="j", up="k", top=3)
    return figures


def _shows(screen: Screen, words: str) -> object:
    return words in screen.text()


def _shows_live_row(screen: Screen) -> object:
    """The name, and a reward that stands only in its metrics file."""
    row = screen.find("run_0000")
    return row is not None and "0.848" in screen.text(row)


def _shows_curve(screen: Screen) -> object:
    row = screen.find("run_0000")
    return row is not None and set("▂▃▄▅▆▇") & set(screen.text(row))


def _shows_whole_curve(screen: Screen) -> object:
    return "Checkpoints" in screen.text() and any(
        f"{LONG_STEPS}│" in line and "step 1 " in line for line in screen.text().splitlines()
    )


def our_charts(path: Path) -> float:
    """From the key that opens the run to the whole curve."""
    workspace = BenchWorkspace(path, num_runs=1, num_steps=1, num_live=1)
    lines = (long_run_line(step, LONG_STEPS) for step in range(1, LONG_STEPS + 1))
    workspace.run(0).orchestrator_metrics.write_text("".join(lines), encoding="utf-8")
    workspace.step = LONG_STEPS
    workspace.beat()
    times = []
    for _ in range(NUM_STARTS):
        with Terminal([sys.executable, "-m", "tui", str(path)]) as terminal:
            terminal.wait(lambda screen: screen.find("run_0000") is not None, "the run")
            terminal.drain(1.5)
            pressed_at = time.perf_counter()
            terminal.press("\r")
            times.append(terminal.wait(_shows_whole_curve, "the curve") - pressed_at)
    return statistics.median(times)


def leets(leet: str, home: Path, scale: Scale) -> Figures:
    """Offline, with its own settings."""
    os.environ |= {"HOME": str(home), "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
    path, last_id = home / "leet" / "wandb", f"run{scale.num_runs - 1:05d}"
    records = (history_record(step, two_figures(step)) for step in range(1, NUM_STEPS + 1))
    runs = make_runs(path, scale.num_runs, records)
    logs = [WandbLog(run) for run in runs[-scale.num_live :]]
    step = NUM_STEPS

    def step_all() -> None:
        nonlocal step
        step += 1
        for log in logs:
            log.write(history_record(step, two_figures(step)))
            log.flush()

    def write_reward(at_step: int, value: float) -> None:
        logs[-1].write(history_record(at_step, two_figures(at_step) | {"reward": value}))
        logs[-1].flush()

    def first_curve(screen: Screen) -> object:
        return screen.find(last_id) is not None and "0.848" in screen.text()

    command = [leet, "leet", str(path)]
    figures: Figures = {"first_paint_s": median_start(command, first_curve)}
    with Terminal(command) as terminal:
        terminal.wait(first_curve, "the first curve")
        terminal.drain(READING_S)
        figures["idle_cpu"] = cpu_share(terminal)
        figures["rss_mb"] = rss_mb(terminal)
        # Each the greatest so far of the run that is shown: then it is the label at the top of its chart.
        values = [(1.11 * number, f"{1.11 * number:.2f}") for number in range(1, NUM_LINES + 1)]
        measure(figures, "metric_to_screen_s", lambda: line_to_screen(terminal, values, write_reward))
    with going(step_all, every_s=1.0), Terminal(command) as terminal:
        terminal.wait(lambda screen: screen.find(last_id) is not None, "the list")
        terminal.drain(4.0)
        measure(figures, "key_p95_ms", lambda: key_p95_ms(terminal, down="s", up="w", top=1))
    for log in logs:
        log.close()
    return figures


def leets_charts(leet: str, home: Path) -> Figures:
    """From the start of the process: given one run, it has no list to open it from. Its last label is at 77 %."""
    os.environ["HOME"] = str(home)
    records = (history_record(step, ten_metrics(step)) for step in range(1, LONG_STEPS + 1))
    (run,) = make_runs(home / "leet" / "wandb", 1, records)
    return {"charts_100k_s": median_start([leet, "leet", str(run)], lambda screen: "76.9k" in screen.text())}


def measure(figures: Figures, name: str, take: Callable[[], float]) -> None:
    """Take a figure; when the other program cannot give it, leave it out and print why."""
    try:
        figures[name] = take()
    except (TimeoutError, RuntimeError) as error:
        print(f"bench: leet gives no {name}: {str(error).splitlines()[0]}", file=sys.stderr)


@contextmanager
def going(work: Callable[[], None], *, every_s: float) -> Iterator[None]:
    """`work` now, and every `every_s` in a thread meanwhile."""
    stop = threading.Event()
    work()

    def repeat() -> None:
        while not stop.wait(every_s):
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def median_start(command: list[str], condition: Callable[[Screen], object]) -> float:
    """From before the process to the condition; one start before, so that files are in the page cache."""
    times = []
    for _ in range(NUM_STARTS + 1):
        with Terminal(command) as terminal:
            times.append(terminal.wait(condition, "the first picture") - terminal.started_at)
    return statistics.median(times[1:])


def cpu_share(terminal: Terminal) -> float:
    """Share of one core of the program and all that it started, without input."""
    before, began_at = _cpu_s(terminal), time.perf_counter()
    terminal.drain(IDLE_S)
    return (_cpu_s(terminal) - before) / (time.perf_counter() - began_at)


def _processes(terminal: Terminal) -> list[psutil.Process]:
    program = psutil.Process(terminal.process.pid)
    return [program, *program.children(recursive=True)]


def _cpu_s(terminal: Terminal) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in _processes(terminal))


def rss_mb(terminal: Terminal) -> float:
    return sum(process.memory_info().rss for process in _processes(terminal)) / 1e6


def key_p95_ms(terminal: Terminal, *, down: str, up: str, top: int) -> float:
    """From a key that moves the cursor to the cursor on its new line; 95th percentile."""
    times = []
    for number in range(NUM_KEYS):
        at = cursor_row(terminal.screen, top)
        forward = number // 10 % 2 == 0
        wanted = at + (1 if forward else -1)
        if _is_cursor(terminal.screen, wanted):
            raise RuntimeError("its cursor looks like other lines")
        pressed_at = time.perf_counter()
        terminal.press(down if forward else up)
        moved_at = terminal.wait(functools.partial(_is_cursor, row=wanted), "the cursor", timeout_s=10.0)
        times.append(1000 * (moved_at - pressed_at))
        # Not in step with the workspace's seconds.
        terminal.drain(0.083)
    return statistics.quantiles(times, n=20)[-1]


def _is_cursor(screen: Screen, row: int) -> bool:
    """Whether its background is unique: every second line of a list may have another one."""
    return sum(line[3] == screen.backs[row][3] for line in screen.backs) == 1


def cursor_row(screen: Screen, top: int) -> int:
    """The first line from `top` on that is one."""
    found = next((row for row in range(top, screen.height - 2) if _is_cursor(screen, row)), None)
    if found is None:
        raise RuntimeError(f"no cursor to be seen:\n{screen.text()}")
    return found


def line_to_screen(terminal: Terminal, values: list[tuple[float, str]], write: Callable[[int, float], None]) -> float:
    """From a new line in a metrics file to its figure on the screen; median over lines at uneven times."""
    times = []
    for number, (value, words) in enumerate(values):
        if words in terminal.screen.text():
            raise RuntimeError(f"{words!r} stands there before it was written")
        written_at = time.perf_counter()
        write(NUM_STEPS + 1 + number, value)
        times.append(terminal.wait(functools.partial(_shows, words=words), words) - written_at)
        terminal.drain(1.3 + 0.17 * number)
    return statistics.median(times)
