"""The jobs that start and stop the workspace and its daemons, as `prl up`, `down` and `restart` do them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from daemons import up_and_down
from daemons.workspace import Workspace
from prime_rl.utils.text import CleanText, clean_text, one_line
from tui.actions.draft import configs_folder
from tui.actions.jobs import Job, Progress, prl_command

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
