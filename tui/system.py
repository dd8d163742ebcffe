"""The System screen as lines of text: the machine, the trainer, inference, the daemons. Pure.

Takes a snapshot, the newest look at the machine and a palette.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.text import Text

from daemons.client import DaemonUse, DiskView, MachineView
from prime_rl.utils.text import one_line
from tui import fmt
from tui.palette import Palette
from tui.snapshot import DaemonRow, Level, Snapshot
from tui.system_watch import SystemLook

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


def machine_lines(look: SystemLook | None, width: int, palette: Palette) -> Lines:
    """Processor, memory, GPUs, disk: a bar each."""
    if look is None:
        return [Text("measuring ...", palette.muted)]
    machine, bar = look.machine, max(min(width - 60, 40), 8)
    load = f"load {machine.load_1m:.1f}, {machine.num_cores} core{'s' if machine.num_cores != 1 else ''}"
    lines = [
        _gauge("cpu", machine.busy, bar, _percent(machine.busy), load, palette),
        _gauge("memory", *_amount(machine.used_bytes, machine.total_bytes, bar), _daemons_memory(machine), palette),
    ]
    for index, gpu in enumerate(machine.gpus):
        lines.append(_gauge(f"gpu {index}", gpu.busy, bar, _percent(gpu.busy), one_line(gpu.name, 40), palette))
        lines.append(_gauge("  memory", *_amount(gpu.used_bytes, gpu.total_bytes, bar), "", palette))
    if look.disk is not None:
        lines.append(_disk(look.disk, bar, palette))
    return lines


def _disk(disk: DiskView, bar: int, palette: Palette) -> Text:
    used = disk.total_bytes - disk.free_bytes
    workspace = f"{'' if disk.workspace_complete else 'at least '}{fmt.size(disk.workspace_bytes)} by this workspace"
    forecast = f", full in {fmt.age(disk.full_in_s)}" if disk.full_in_s is not None else ""
    share = used / disk.total_bytes if disk.total_bytes else None
    return _gauge("disk", share, bar, f"{fmt.size(disk.free_bytes)} free{forecast}", workspace, palette)


def _amount(used: int, total: int, bar: int) -> tuple[float | None, int, str]:
    return (used / total if total else None), bar, f"{fmt.size(used)} of {fmt.size(total)}"


def _gauge(name: str, share: float | None, bar: int, value: str, note: str, palette: Palette) -> Text:
    colour = palette.success
    if share is not None and share >= HIGH:
        colour = palette.error if share >= FULL else palette.warning
    filled, empty = fmt.bar(share or 0.0, 1.0, bar)
    return Text.assemble(
        (f"{name:<9}", palette.muted),
        (filled, colour),
        (empty, palette.faint),
        f" {value}",
        (f"  {note}", palette.muted),
    )


def _percent(share: float | None) -> str:
    return f"{100 * share:.0f} %" if share is not None else fmt.DASH


def _daemons_memory(machine: MachineView) -> str:
    total = sum(use.rss_bytes for use in machine.daemons.values())
    return f"{fmt.size(total)} by this workspace" if total else ""


def trainer_lines(snapshot: Snapshot, look: SystemLook | None, width: int, palette: Palette) -> Lines:
    trainer = snapshot.workspace.trainer
    if trainer is None:
        return [_title("trainer", "not running: start it with prl up", palette)]
    facts = [
        f"{snapshot.num_used}/{snapshot.max_runs} slots",
        f"{look.updates_per_s:.2g} updates/s" if look and look.updates_per_s is not None else None,
        f"{trainer.num_updates} updates",
        f"{fmt.count(trainer.tokens_per_s)} tok/s",
        f"rank ≤ {trainer.max_rank}" if trainer.max_rank else None,
    ]
    lines = [_title("trainer", " · ".join(fact for fact in facts if fact), palette)]
    if trainer.waiting_on:
        lines.append(Text.assemble(("  waits for ", palette.muted), (trainer.waiting_on, palette.warning)))
    split = time_split(trainer.time_s, max(width - 2, 10), palette)
    return [*lines, *(Text.assemble("  ", line) for line in split)]


def time_split(time_s: Mapping[str, float], width: int, palette: Palette) -> Lines:
    """A bar of where the time since the last update went, and its legend; nothing before the first update."""
    known = {name: max(time_s.get(name, 0.0), 0.0) for name, _, _ in TIME_PARTS}
    total = sum(known.values())
    if not total > 0:
        return []
    colours = (palette.muted, palette.success, palette.secondary, palette.primary, palette.accent)
    bar, legend, at = Text(), Text(), 0.0
    for (name, words, shade), colour in zip(TIME_PARTS, colours, strict=True):
        start, at = round(at / total * width), at + known[name]
        bar.append(shade * (round(at / total * width) - start), colour)
        if known[name]:
            legend.append(f"{shade} ", colour).append(f"{words} {100 * known[name] / total:.0f} %   ", palette.muted)
    return [bar, legend]


def inference_lines(snapshot: Snapshot, width: int, palette: Palette) -> Lines:
    inference = snapshot.workspace.inference
    if inference is None:
        return [_title("inference", "not running: start it with prl up", palette)]
    facts = ((inference.engine, 20), (inference.model, 40), (inference.base_url, 40))
    lines = [_title("inference", " · ".join(fmt.shorten(fact, width) for fact, width in facts if fact), palette)]
    requests = Text.assemble(
        ("  requests ", palette.muted),
        (f"{inference.num_running} running", "bold" if inference.num_running else palette.muted),
        (f" {inference.num_waiting} waiting", palette.warning if inference.num_waiting else palette.muted),
        (f"   {fmt.count(inference.tokens_per_s)} tok/s", palette.muted),
    )
    if inference.kv_use is not None:
        filled, empty = fmt.bar(inference.kv_use, 1.0, 12)
        colour = palette.warning if inference.kv_use >= HIGH else palette.success
        requests.append("   room ", palette.muted).append(filled, colour).append(empty, palette.faint)
        requests.append(f" {100 * inference.kv_use:.0f} %", palette.muted)
    names = [fmt.shorten(name, 80) for name in inference.adapters]
    shown = ", ".join(names[:MAX_ADAPTERS]) + (f" and {len(names) - MAX_ADAPTERS} more" if names[MAX_ADAPTERS:] else "")
    adapters = Text.assemble((f"  adapters {len(names)}  ", palette.muted), shown)
    return [*lines, requests, adapters] if names else [*lines, requests]


def _title(name: str, facts: str, palette: Palette) -> Text:
    return Text.assemble((f"{name}  ", f"bold {palette.primary}"), (facts, palette.muted))


def daemon_heading(name_width: int) -> Text:
    return Text(f"  {'DAEMON':<{name_width}}  {'STATE':<11}{'CPU':>6}{'MEMORY':>11}{'PROC':>6}  NOTE")


def daemon_line(daemon: DaemonRow, use: DaemonUse | None, name_width: int, palette: Palette) -> Text:
    colour = palette.level(daemon.level)
    name = fmt.shorten_middle(daemon.name, name_width)
    cores = f"{100 * use.cores:.0f} %" if use and use.cores is not None else fmt.DASH
    processes = str(use.num_processes) if use else fmt.DASH
    figures = f"{cores:>6}{fmt.size(use.rss_bytes) if use else fmt.DASH:>11}{processes:>6}"
    restarts = (
        f"{daemon.num_restarts} restart{'s' if daemon.num_restarts != 1 else ''}  " if daemon.num_restarts else ""
    )
    return Text.assemble(
        " ",
        (f" {name:<{name_width}}  ", "bold"),
        (f"{daemon.symbol} {daemon.state:<9}", colour),
        (figures, palette.text),
        (f"  {restarts}", palette.warning),
        (daemon.detail, palette.text if daemon.level >= Level.WARN else palette.muted),
    )


def daemon_name_width(daemons: Iterable[DaemonRow], width: int) -> int:
    """Cells for the names of `daemons`: as many as the longest takes, and not too many of `width`."""
    return min(max((len(daemon.name) for daemon in daemons), default=0), 20 if width < 110 else 36)


def daemon_detail(daemon: DaemonRow, palette: Palette, num_lines: int) -> Lines:
    """The reason for its state, and the end of its log if it crashed."""
    facts = [f"pid {daemon.pid}" if daemon.pid else "", daemon.detail]
    said = "  ".join(fact for fact in facts if fact)
    lines = [Text.assemble((f"{daemon.symbol} {daemon.name}  ", palette.level(daemon.level)), said)] if said else []
    room = max(num_lines - len(lines), 0)
    log: Sequence[str] = daemon.log_tail[-room:] if room else ()
    return [*lines, *(Text.assemble(("│ ", palette.faint), (line, palette.muted)) for line in log)]
