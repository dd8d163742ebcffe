"""The jobs on the workspace, as `prl up`, `down`, `restart` and `alerts` do them: start, stop, acknowledge, mute."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from daemons import quiet, up_and_down
from daemons.workspace import Workspace
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.clock import parse_duration_s
from prime_rl.utils.text import CleanText, clean_text, one_line
from tui.actions.draft import configs_folder
from tui.actions.jobs import Job, Progress, each, prl_command

DURATIONS = ("1h", "8h", None)
MAX_SYSTEMS = 20


def restart_job(output_dir: Path, name: str) -> Job:
    """Restart one daemon."""

    def work(progress: Progress) -> str:
        up_and_down.restart_daemon(output_dir, name, say=progress)
        return f"{name}: restarted"

    return Job(prl_command(output_dir, "restart", name), work)


def down_job(output_dir: Path) -> Job:
    """Stop the workspace."""

    def work(progress: Progress) -> str:
        was_running = up_and_down.stop_workspace(output_dir, say=progress)
        return "stopped, no process is left" if was_running else "nothing was running"

    return Job(prl_command(output_dir, "down"), work)


def up_job(output_dir: Path, system: Path | None) -> Job:
    """Start the workspace with its last settings, or with those of the file."""
    words = ["@", str(system)] if system else []

    def work(progress: Progress) -> str:
        wanted = up_and_down.choose_system(words, output_dir, say=progress)
        said: list[str] = []

        def look(workspace: Workspace) -> None:
            line = " · ".join(up_and_down.waits(workspace))
            if [line] != said:
                said[:] = [line]
                progress(line)

        workspace = up_and_down.start_workspace(wanted, stop=lambda: False, say=progress, on_look=look, is_quiet=True)
        url = workspace.inference.base_url if workspace and workspace.inference else "?"
        return f"up: {workspace.max_runs if workspace else 0} slots, inference at {url}"

    return Job(prl_command(output_dir, "up", *words), work)


def up_choices(output_dir: Path) -> list[tuple[CleanText, Callable[[], Job]]]:
    """(label, job) of each way to start the workspace, the most likely first."""
    last = up_and_down.last_start(output_dir)
    first = "with its last settings" if last else "a small workspace for this machine's CPU"
    configs = configs_folder()
    files = [path for path in sorted(configs.glob("*/system.toml"))[:MAX_SYSTEMS] if clean_text(str(path)) == str(path)]
    return [
        (one_line(first), functools.partial(up_job, output_dir, None)),
        *(
            (one_line(f"as in {path.relative_to(configs.parent)}", 100), functools.partial(up_job, output_dir, path))
            for path in files
        ),
    ]


def ack_job(output_dir: Path, names: Sequence[str]) -> Job:
    """Acknowledge incidents; each name is KIND:SUBJECT, or a subject for all of its open ones."""

    def act(name: str, progress: Progress) -> str:
        new = quiet.acknowledge(output_dir, name)
        return f"{name}: acknowledged" if new else f"{name}: already acknowledged"

    return Job(prl_command(output_dir, "alerts", "ack", *names), each(names, "acknowledged", act))


def mute_job(output_dir: Path, what: str, duration: str | None = None) -> Job:
    """`duration` as people write it; None: until it is unmuted."""
    words = ["--for", duration] if duration else []

    def work(progress: Progress) -> str:
        quiet.mute(output_dir, what, for_s=parse_duration_s(duration) if duration else None)
        return f"{what}: muted {f'for {duration}' if duration else 'until it is unmuted'}"

    return Job(prl_command(output_dir, "alerts", "mute", what, *words), work)


def unmute_job(output_dir: Path, what: str) -> Job:
    """End the mute of a kind, a subject or KIND:SUBJECT."""

    def work(progress: Progress) -> str:
        return f"{what}: {'unmuted' if quiet.unmute(output_dir, what) else 'not muted'}"

    return Job(prl_command(output_dir, "alerts", "unmute", what), work)


def mute_choices(output_dir: Path, subject: str, names: Sequence[str]) -> list[tuple[CleanText, Callable[[], Job]]]:
    """(label, job) of each way to mute a subject and the kinds of its incidents `names`; first, to end such mutes."""
    kinds = dict.fromkeys(name.partition(":")[0] for name in names)
    silences = quiet.read_silences(OutputDir(output_dir), time.time())
    muted = [each.name for each in silences if each.action == "muted" and each.name in (subject, *kinds, *names)]
    found: list[tuple[CleanText, Callable[[], Job]]] = [
        (one_line(f"end the mute of {what}"), functools.partial(unmute_job, output_dir, what)) for what in muted
    ]
    for what in (subject, *kinds):
        for duration in DURATIONS:
            how_long = f"for {duration}" if duration else "until it is unmuted"
            label = one_line(f"{what}{' of all runs and daemons' if what in kinds else ''} {how_long}")
            found.append((label, functools.partial(mute_job, output_dir, what, duration)))
    return found
