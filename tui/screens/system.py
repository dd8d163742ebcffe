"""The machine and the daemons: what trainer, inference and orchestrators do and use, and how long the disk lasts.

And everything that needs a person, newest first: Enter opens the run, the daemon or the node that has the problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from daemons.machine import DaemonUse
from daemons.workspace import NO_SAMPLING
from prime_rl.contract.status import InferenceStatus
from prime_rl.utils.text import one_line, size_text
from tui import fmt
from tui.messages import SystemChanged
from tui.model.levels import LEVEL_SYMBOLS, Level, Problem
from tui.model.snapshot import DaemonRow, RunRow, Snapshot
from tui.readers.machine import SystemLook, SystemProbe
from tui.screens.base import PlaceScreen, Setting
from tui.watcher import SystemWatcher
from tui.widgets.line_list import Clipped, LineList, joined

# Where there is room, so many lines of the selected daemon's log.
DETAIL_LINES = 8
WIDE = 120
# Where the trainer's time goes, in the order of the bar: name in the status file, label, a shade instead of a colour.
TIME_PARTS = (
    ("wait", "wait", "░"),
    ("forward_backward", "train", "█"),
    ("optim", "optimizer", "▓"),
    ("broadcast", "publish", "▒"),
    ("checkpoint", "checkpoint", "▪"),
)
HIGH, FULL = 0.8, 0.95
MAX_ADAPTERS = 8
Lines = list[Text]


def machine_lines(look: SystemLook | None, width: int) -> Lines:
    """Processor, memory, GPUs, disk: a bar each."""
    if look is None:
        return [Text.styled("measuring ...", "muted")]
    machine, bar = look.machine, max(min(width - 66, 40), 8)
    load = f"load {machine.load_1m:.1f}, {fmt.counted(machine.num_cores, 'core')}"
    ours = sum(use.rss_bytes for use in machine.daemons.values())
    note = f"{size_text(ours)} by this workspace" if ours else ""
    lines = [
        _gauge("cpu", machine.busy, bar, fmt.percent(machine.busy), load),
        _gauge("memory", *_amount(machine.used_bytes, machine.total_bytes, bar), note),
    ]
    for index, gpu in enumerate(machine.gpus):
        lines.append(_gauge(f"gpu {index}", gpu.busy, bar, fmt.percent(gpu.busy), one_line(gpu.name, 40)))
        lines.append(_gauge("  memory", *_amount(gpu.used_bytes, gpu.total_bytes, bar), ""))
    if (disk := look.disk) is not None:
        share = (1 - disk.free_bytes / disk.total_bytes) if disk.total_bytes else None
        forecast = f", full in {fmt.age(disk.full_in_s)}" if disk.full_in_s is not None else ""
        note = f"{'' if disk.workspace_complete else 'at least '}{size_text(disk.workspace_bytes)} by this workspace"
        lines.append(_gauge("disk", share, bar, f"{size_text(disk.free_bytes)} free{forecast}", note))
    return lines


def _amount(used: int, total: int, bar: int) -> tuple[float | None, int, str]:
    return (used / total if total else None), bar, f"{size_text(used)} of {size_text(total)}"


def _gauge(name: str, share: float | None, bar: int, value: str, note: str) -> Text:
    colour = "success"
    if share is not None and share >= HIGH:
        colour = "error" if share >= FULL else "warning"
    filled, empty = fmt.bar(share or 0.0, 1.0, bar)
    return Text.assemble(
        (f"{name:<9}", "muted"),
        (filled, colour),
        (empty, "faint"),
        f" {value}",
        (f"  {note}", "muted"),
    )


def trainer_lines(snapshot: Snapshot, look: SystemLook | None, width: int) -> Lines:
    """The trainer's slots, speed, what it waits for, where its time goes. `look`: None before the first."""
    trainer = snapshot.workspace.trainer
    if trainer is None:
        return [_title("trainer", "not running: start it with prl up")]
    speed = f", {look.updates_per_s:.2g}/s" if look and look.updates_per_s is not None else ""
    facts = [
        f"{snapshot.num_used}/{snapshot.max_runs} slots",
        f"{trainer.num_updates} updates{speed}",
        f"trains {fmt.count(trainer.tokens_per_s)} tok/s",
        f"rank ≤ {trainer.max_rank}" if trainer.max_rank else None,
    ]
    lines = [_title("trainer", " · ".join(fact for fact in facts if fact))]
    if trainer.waiting_on:
        lines.append(Text.assemble(("  waits for ", "muted"), (trainer.waiting_on, "warning")))
    split = time_split(trainer.time_s, max(width - 2, 10))
    return [*lines, *(Text.assemble("  ", line) for line in split)]


def time_split(time_s: Mapping[str, float], width: int) -> Lines:
    """A bar of where the time since the last update went, and its legend; nothing before the first update."""
    known = {name: max(time_s.get(name, 0.0), 0.0) for name, _, _ in TIME_PARTS}
    total = sum(known.values())
    if not total > 0:
        return []
    colours = ("muted", "success", "secondary", "primary", "accent")
    bar, legend, at = Text(), Text(), 0.0
    for (name, words, shade), colour in zip(TIME_PARTS, colours, strict=True):
        start, at = round(at / total * width), at + known[name]
        bar.append(shade * (round(at / total * width) - start), colour)
        if known[name]:
            legend.append(f"{shade} ", colour).append(f"{words} {fmt.percent(known[name] / total)}  ", "muted")
    legend.rstrip()
    return [bar, legend]


def inference_lines(snapshot: Snapshot, width: int) -> Lines:
    """The engine, model, requests of each server and loaded adapters of inference."""
    inference = snapshot.workspace.inference
    if inference is None:
        needed = snapshot.workspace.needs_inference
        return [_title("inference", "not running: start it with prl up" if needed else NO_SAMPLING)]
    replicas = snapshot.workspace.replicas
    several = len(replicas) > 1
    place = f"{len(replicas)} servers" if several else inference.base_url
    facts = ((inference.engine, 20), (inference.model, 40), (place, 40))
    lines = [_title("inference", " · ".join(fmt.shorten(fact, width) for fact, width in facts if fact))]
    lines.append(_requests("  requests ", inference))
    if several:
        lines += [_requests(f"  {number} {fmt.shorten(each.base_url, 40)} ", each) for number, each in replicas]
    names = [fmt.shorten(name, 80) for name in inference.adapters]
    shown = ", ".join(names[:MAX_ADAPTERS]) + (f" and {len(names) - MAX_ADAPTERS} more" if names[MAX_ADAPTERS:] else "")
    return [*lines, Text.assemble((f"  adapters {len(names)}  ", "muted"), shown)] if names else lines


def _requests(label: str, inference: InferenceStatus) -> Text:
    """The requests of one server, or of all together."""
    requests = Text.assemble(
        (label, "muted"),
        (f"{inference.num_running} running", "bold" if inference.num_running else "muted"),
        (f" {inference.num_waiting} waiting", "warning" if inference.num_waiting else "muted"),
        (f"   generates {fmt.count(inference.tokens_per_s)} tok/s", "muted"),
    )
    if inference.kv_use is not None:
        filled, empty = fmt.bar(inference.kv_use, 1.0, 8)
        colour = "warning" if inference.kv_use >= HIGH else "success"
        requests.append("   room ", "muted").append(filled, colour).append(empty, "faint")
        requests.append(f" {fmt.percent(inference.kv_use)}", "muted")
    return requests


def _title(name: str, facts: str) -> Text:
    return Text.assemble((f"{name}  ", "bold primary"), (facts, "muted"))


def daemon_line(daemon: DaemonRow, use: DaemonUse | None, name_width: int) -> Text:
    """A daemon: its state, what it uses, its restarts and details. `use`: None when it was not measured."""
    colour = daemon.level.style
    name = fmt.shorten_middle(daemon.name, name_width)
    cores = fmt.percent(use.cores if use else None)
    processes = str(use.num_processes) if use else fmt.DASH
    figures = f"{cores:>6}{size_text(use.rss_bytes) if use else fmt.DASH:>11}{processes:>6}"
    restarts = f"{fmt.counted(daemon.num_restarts, 'restart')}  " if daemon.num_restarts else ""
    return Text.assemble(
        " ",
        (f" {name:<{name_width}}  ", "bold"),
        (f"{daemon.symbol} {daemon.state:<9}", colour),
        (figures, "text"),
        (f"  {restarts}", "warning"),
        (daemon.detail, "text" if daemon.level >= Level.WARN else "muted"),
    )


def daemon_detail(daemon: DaemonRow, num_lines: int) -> Lines:
    """The reason for its state, and the end of its log if it crashed."""
    whose = "below: the log of the process before it" if daemon.pid and daemon.log_tail else ""
    facts = [f"pid {daemon.pid}" if daemon.pid else "", whose, daemon.detail]
    said = "  ".join(fact for fact in facts if fact)
    lines = [Text.assemble((f"{daemon.symbol} {daemon.name}  ", daemon.level.style), said)] if said else []
    room = max(num_lines - len(lines), 0)
    log: Sequence[str] = daemon.log_tail[-room:] if room else ()
    return [*lines, *(Text.assemble(("│ ", "faint"), (line, "muted")) for line in log)]


class SystemScreen(PlaceScreen):
    """Owns the thread that asks the machine; it runs while this screen is open."""

    DEFAULT_CSS = """
    SystemScreen {
        & > Static { text-wrap: nowrap; text-overflow: ellipsis; }
        & > #machine { height: auto; padding: 1 1 0 1; }
        & > #trainer, & > #inference { height: auto; padding: 1 1 0 1; }
        & > #daemons { height: 1fr; margin-top: 1; min-height: 4; }
        & > #detail { height: auto; max-height: 9; padding: 0 1; background: $panel; }
        &.-small > #machine, &.-small > #trainer, &.-small > #inference { padding: 0 1; }
        &.-small > #daemons { margin-top: 0; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,P", "app.pop_screen", "Back", key_display="esc"),
    ]
    AUTO_FOCUS = "#daemons"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.machine = Static(id="machine", markup=False)
        self.trainer = Static(id="trainer", markup=False)
        self.inference = Static(id="inference", markup=False)
        self.daemons = LineList[str](id="daemons", opens=True)
        self.detail = Clipped(id="detail", markup=False)
        self.look: SystemLook | None = None
        probe = (setting.make_probe or SystemProbe)(setting.output_dir)
        self._watcher = SystemWatcher(probe, self.post_message)

    def compose_body(self) -> ComposeResult:
        """Yield the machine, the trainer, inference, the daemons and the selected daemon."""
        yield self.machine
        yield self.trainer
        yield self.inference
        yield self.daemons
        yield self.detail

    def on_mount(self) -> None:
        """Start the thread that measures the machine."""
        self.run_worker(self._watcher.run, thread=True, name="measure the machine")

    def on_unmount(self) -> None:
        """Stop the thread that measures the machine."""
        self._watcher.stop()

    def on_resize(self) -> None:
        """Below 34 lines leave out the blank lines between the parts."""
        self.set_class(self.size.height < 34, "-small")

    def target_row(self) -> RunRow | None:
        """An orchestrator is a daemon by the name of its run."""
        name = self.daemons.selected
        return self.snapshot.row(name) if self.snapshot and name else None

    def target_daemon(self) -> str | None:
        """The name of the daemon under the cursor; None when there are no daemons."""
        return self.daemons.selected

    def refill(self, snapshot: Snapshot) -> None:
        """Draw all, and let the thread measure the daemons of this look from here on."""
        self._watcher.take(snapshot.workspace)
        width = max(self.size.width - 2, 20)
        self.machine.update(joined(machine_lines(self.look, width)))
        self.trainer.update(joined(trainer_lines(snapshot, self.look, width)))
        self.inference.update(joined(inference_lines(snapshot, width)))
        uses = self.look.machine.daemons if self.look else {}
        # As many cells as the longest name takes, and not too many of the width.
        names = min(max((len(daemon.name) for daemon in snapshot.daemons), default=0), 20 if width < 110 else 36)
        lines = [daemon_line(daemon, uses.get(daemon.name), names) for daemon in snapshot.daemons]
        heading = Text(f"  {'DAEMON':<{names}}  {'STATE':<11}{'CPU':>6}{'MEMORY':>11}{'PROC':>6}  NOTE")
        self.daemons.show([daemon.name for daemon in snapshot.daemons], lines.__getitem__, [heading])
        self._show_detail()

    def on_system_changed(self, message: SystemChanged) -> None:
        """Keep what was measured, and redraw."""
        self.look = message.look
        self.redraw()

    @on(LineList.Opened)
    def _opened(self) -> None:
        if row := self.target_row():
            self.guide.open_run(row.run_id)

    @on(LineList.Moved)
    def _show_detail(self) -> None:
        daemons = self.snapshot.daemons if self.snapshot else ()
        daemon = next((each for each in daemons if each.name == self.daemons.selected), None)
        room = DETAIL_LINES if self.size.height >= 34 else 2
        lines = daemon_detail(daemon, room) if daemon else []
        self.detail.display = bool(lines)
        self.detail.update(joined(lines))
        self.show_keys()


_PLACES = {"daemon": "system", "workspace": "system", "node": "nodes"}


def key_of(problem: Problem) -> str:
    """The key of a problem's line, the same at each look."""
    return f"{problem.target} {problem.name} {problem.kind}".rstrip()


def problem_line(problem: Problem, now: float, name_width: int) -> Text:
    """Age, level, name and text of a problem. `now` in Unix seconds, `name_width` in cells."""
    age = fmt.age(now - problem.since) if problem.since is not None else fmt.DASH
    colour = problem.level.style
    return Text.assemble(
        f"  {age:>4} ",
        (f"{LEVEL_SYMBOLS[problem.level]} ", colour),
        (f"{fmt.shorten_middle(problem.name, name_width):<{name_width}} ", "bold"),
        (f"{problem.note.partition(' ')[0]} " if problem.note else "", "muted"),
        (problem.text, "text"),
    )


class ProblemsScreen(PlaceScreen):
    """Reads only; what acts on runs acts on the run of the selected problem."""

    DEFAULT_CSS = """
    ProblemsScreen {
        & > #problems { height: 1fr; }
        & > #none { height: 1fr; width: 1fr; content-align: center middle; color: $text-success; display: none; }
        &.-none > #none { display: block; }
        &.-none > #problems { display: none; }
        & > #detail { height: auto; max-height: 35%; padding: 0 1; background: $panel; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "app.pop_screen", "Back", key_display="esc"),
    ]
    AUTO_FOCUS = "#problems"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.problems = LineList[str](id="problems", opens=True)
        self.nothing = Static("✔ no problems in this workspace", id="none", markup=False)
        self.detail = Clipped(id="detail", markup=False)

    def compose_body(self) -> ComposeResult:
        """Yield the list, what stands there without problems, and all about the selected one."""
        yield self.problems
        yield self.nothing
        yield self.detail

    def refill(self, snapshot: Snapshot) -> None:
        """Draw all; the cursor stays on its problem."""
        now = self.setting.clock()
        keys = [key_of(problem) for problem in snapshot.problems]
        most = 22 if self.size.width < 110 else 40
        name_width = min(max((len(problem.name) for problem in snapshot.problems), default=0), most)
        lines = [problem_line(problem, now, name_width) for problem in snapshot.problems]
        self.set_class(not lines, "-none")
        self.problems.show(keys, lines.__getitem__, [Text("   AGE   WHAT")])
        if lines and self.focused is None:
            self.problems.focus()
        self._show_detail()

    def target_row(self) -> RunRow | None:
        """The run that has the selected problem; None for other problems."""
        problem = self.selected_problem()
        return self.snapshot.row(problem.name) if problem and self.snapshot and problem.target == "run" else None

    def target_daemon(self) -> str | None:
        """The daemon that has the selected problem, or the orchestrator of the run that has it; else None."""
        problem = self.selected_problem()
        return problem.name if problem and problem.target in ("daemon", "run") else None

    @on(LineList.Opened)
    def _opened(self) -> None:
        problem = self.selected_problem()
        if problem is None:
            return
        if self.target_row() is not None:
            self.guide.open_run(problem.name)
        elif problem.target in _PLACES:
            self.guide.go(_PLACES[problem.target])
        else:
            self.notify(problem.text, title=problem.name, markup=False)

    @on(LineList.Moved)
    def _show_detail(self) -> None:
        problem = self.selected_problem()
        self.detail.display = problem is not None
        if problem is not None:
            row = self.target_row()
            whole = row.reason if row and row.reason and not problem.kind else problem.text
            note = f"\n{problem.note}" if problem.note else ""
            name = (f"{problem.name}\n", f"bold {problem.level.style}")
            self.detail.update(Text.assemble(name, whole, (note, "muted")))
        self.show_keys()

    def selected_problem(self) -> Problem | None:
        """The problem under the cursor; None when there are no problems."""
        problems = self.snapshot.problems if self.snapshot else ()
        return next((problem for problem in problems if key_of(problem) == self.problems.selected), None)
