"""`prl up`: which house it means, the base model when nobody named one, and the wait until everything answers.

Without `@ FILE` it starts the house as it was last started (`daemons/configs/up.toml` keeps what was said then), else a
small one as in `configs/demo/system.toml`, whose base model is made when it is missing. `launch` does the work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer
from rich.live import Live
from rich.text import Text

from daemons import launch
from daemons.client import House, read_house
from daemons.commands.common import EXTRA, OutputDirOption, choose_output_dir, console, say
from daemons.commands.demo import CONFIGS
from daemons.pidfile import SupervisorLock
from prime_rl.configs.base import build, load_toml, merge, read_argv
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.text import clean_text

UP = "up"


@dataclass(frozen=True)
class Wanted:
    """What `prl up` was asked for. `said` is kept for the next time; `is_small`: nobody named a file or a model."""

    system: SystemConfig
    said: Mapping[str, Any]
    is_small: bool


def up(
    context: typer.Context,
    output_dir: OutputDirOption = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Supervise here until Ctrl-C; no daemon.")] = False,
) -> None:
    """Start trainer, inference and the orchestrators of all runs, and keep them alive.

    Without @ FILE: the house as it was last started, else a small one whose base model is made when it is missing.
    Example: prl up @ configs/demo/system.toml --inference.port 8001
    """
    from daemons import supervisor
    from prime_rl.utils.signals import StopFlag

    stop = StopFlag().install()
    wanted = choose_system(context.args, output_dir)
    system, output = wanted.system, OutputDir(wanted.system.output_dir)
    if wanted.is_small and not _is_held(output):
        from daemons.base_model import make_base_model

        make_base_model(system.model.name, stop, say)
        if stop():
            raise typer.Exit(130)
    lock = launch.prepare(system, output, say)
    write_atomic(output.component_config(UP), tomli_w.dumps(wanted.said))
    if foreground:
        raise typer.Exit(supervisor.supervise(output, lock, stop))
    child = launch.start_supervisor(output, lock)
    try:
        with Progress() as look:
            ready = launch.wait_until_ready(system, output, child, stop=stop, on_look=look)
    except launch.LaunchError:
        launch.down(output, timeout_s=None, say=say, supervisor=child)
        raise
    if not ready:
        launch.down(output, timeout_s=None, say=say, supervisor=child)
        raise typer.Exit(130)
    house = read_house(output.path)
    url = house.inference.base_url if house.inference else ""
    same = output.path == choose_output_dir(output_dir)
    where = "" if same else f" --output-dir {output.path}"
    say(
        f"up: {output.path}, {house.max_runs} slots, inference at {url}; prl status{where} shows it, prl down{where} "
        "stops it"
    )


def choose_system(args: Sequence[str], output_dir: Path | None) -> Wanted:
    """The system that the command line means. Raises ConfigError."""
    data, source = read_argv(args)
    chosen = output_dir or os.environ.get("PRL_OUTPUT_DIR")
    small = False
    if not any(arg.startswith("@") for arg in args) and "model" not in data:
        chosen = chosen or data.get("output_dir") or choose_output_dir(None)
        base, source, small = _without_a_file(Path(str(chosen)))
        data = merge(base, data)
    if chosen:
        place = {"output_dir": str(chosen)}
        data = merge(data, {**place, "trainer": place, "inference": place})
    return Wanted(build(SystemConfig, data, source), data, small)


def _without_a_file(output_dir: Path) -> tuple[dict[str, Any], str, bool]:
    """(values, their source, whether it is the small house)."""
    last = OutputDir(output_dir).component_config(UP)
    if last.is_file():
        say(f"no system file: {output_dir} as it was last started ({last})")
        return load_toml(last), str(last), False
    small = CONFIGS / "system.toml"
    if small.is_file():
        say(f"no system file: a small house for this machine's CPU, as in {_short(small)}")
        return load_toml(small), str(small), True
    return {}, "command line", False


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _is_held(output: OutputDir) -> bool:
    """Whether a supervisor has this house: then nothing is made for it, and `launch.prepare` says who it is."""
    if not output.supervisor_lock.exists():
        return False
    lock = SupervisorLock.acquire(output)
    if lock is not None:
        os.close(lock.fd)
    return lock is None


class Progress:
    """Shows the wait for readiness: one live line a part on a terminal, a line at each change elsewhere."""

    def __enter__(self) -> Callable[[House], None]:
        screen = console()
        self._live = Live(console=screen, auto_refresh=False) if screen.is_terminal else None
        self._said: list[str] = []
        if self._live is not None:
            self._live.start()
        return self._look

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _look(self, house: House) -> None:
        lines = [clean_text(line) for line in launch.waits(house)]
        if self._live is not None:
            self._live.update(Text("\n".join(lines)), refresh=True)
        else:
            for line in lines:
                if line not in self._said:
                    say(line)
            self._said = lines


def register(app: typer.Typer) -> None:
    app.command(context_settings=EXTRA)(up)
