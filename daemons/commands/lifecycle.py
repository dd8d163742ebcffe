"""Commands for a workspace (`prl up|down|status|logs|doctor|restart|scale`), and for one component in this process.

Without `@ FILE` `prl up` starts the workspace with its last settings (kept in `daemons/configs/up.toml`), else a small
one as in `configs/demo/system.toml`, whose base model is made when it is missing. `up_and_down` does the work. `prl
scale` changes only the saved settings: the supervisor starts or ends servers at its next look, or at the next `prl up`.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from daemons import supervisor_process, up_and_down
from daemons.commands import complete
from daemons.commands.acts import ReasonOption
from daemons.commands.common import (
    JsonOption,
    OutputDirOption,
    Passing,
    WatchOption,
    choose_output_dir,
    complain,
    console,
    existing_output,
    no_workspace,
    print_json,
    say,
    say_or_stop,
    stop_without_output,
    watch,
)
from daemons.commands.runs import workspace_json, workspace_view
from daemons.doctor import examine
from daemons.errors import ActionError, WrongUseError, need_cpu, one_line_errors, record_act
from daemons.logs import JOB_LOG, SRUN_LOG, end_of_lines, last_lines
from daemons.machine import DiskReader
from daemons.pidfile import read_info
from daemons.specs import (
    FIT_MODULE,
    GATEWAY,
    INFERENCE,
    MAKE_BASE_MODULE,
    OPTIONAL,
    ORCHESTRATOR,
    SYSTEM,
    TRAINER,
    UP,
    kind_of,
    module_of,
)
from daemons.submit import is_for_a_job
from daemons.trash import existing_run
from daemons.workspace import SUPERVISOR, Workspace
from daemons.workspace_reader import WorkspaceReader, read_workspace
from prime_rl.configs.base import ConfigError, build, load_toml, merge
from prime_rl.configs.explain import walk
from prime_rl.configs.system import MakeBaseConfig, SystemConfig
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import LayoutError, OutputDir
from prime_rl.utils.process import StopFlag
from prime_rl.utils.tail import FileTail
from prime_rl.utils.text import clean_text, counted

FOLLOW_EVERY_S = 0.25
# As in `logs.node_log`: the log of a daemon's node after its first.
_NODE = re.compile(r"-node[1-9][0-9]*$")
scale_app = typer.Typer(no_args_is_help=True, help="Change how many of a daemon there are, while they run.")
MAX_PORT = 65_535
_CHECK_STYLES = {"ok": "green", "warning": "yellow", "broken": "red"}
FIT_HELP = """Show what a pass of the trainer needs in GPU memory, and what fits.

Needs no GPU and no download: the real pass runs on tensors without memory. Prints also the largest micro-batch, the
most runs, and how to divide one GPU between trainer and vLLM."""


def up(
    context: typer.Context,
    output_dir: OutputDirOption = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in the foreground until Ctrl-C, for systemd and containers.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run where, with the exact commands; start nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON; its format is stable.")] = False,
) -> None:
    """Start a workspace's daemons in the background.

    Starts a supervisor, which starts the trainer, the inference server and the orchestrators of all runs, and restarts
    those that fail. Returns when trainer and inference are ready. Running with these settings already, it changes
    nothing; other settings need prl down first.

    @ FILE is the system file (TOML): base model, slots, engine. --key.subkey VALUE overrides one field. Without @ FILE
    the workspace starts with its last settings; a new one starts small, on this machine's CPU, and builds its base
    model.

    With deployment.engine = "slurm" outside an allocation it submits a job, which does this on its first node.

    Example: prl up @ configs/demo/system.toml --inference.port 8001
    """
    if as_json and not dry_run:
        raise WrongUseError("--json is for prl up --dry-run")
    if dry_run:
        _show_plan(choose_system(context.args, output_dir, say=lambda line: None), as_json)
        return
    from daemons import supervisor

    stop = StopFlag().install()
    tell = say_or_stop(stop)
    wanted = choose_system(context.args, output_dir)
    output = OutputDir(wanted.system.output_dir)
    if not output.path.exists():
        tell(f"a new workspace will be made: {output.path.absolute()}")
    if foreground and is_for_a_job(wanted.system):
        raise WrongUseError(
            '--foreground with deployment.engine = "slurm" outside an allocation: leave it out to submit a job'
        )
    if foreground:
        ready = up_and_down.make_ready(wanted, output, stop=stop, say=tell, is_quiet=False)
        if ready is None:
            raise typer.Exit(130)
        lock, place = up_and_down.take_workspace(ready, output, tell), OutputDir(output.path.resolve())
        os.chdir(wanted.folder)
        raise typer.Exit(supervisor.supervise(place, lock, stop))
    with shown_wait(stop) as look:
        workspace = up_and_down.start_workspace(wanted, stop=stop, say=tell, on_look=look)
    if workspace is None:
        raise typer.Exit(130)
    same = output.path == choose_output_dir(None)
    where = "" if same else f" --output-dir {output.path}"
    say(
        f"up: {output.path}, {counted(workspace.max_runs, 'slot')}, {workspace.address}; "
        f"prl status{where} shows it, prl down{where} stops it"
    )
    if not workspace.runs:
        say(f"no runs yet: prl runs add FILE.toml{where} adds one")


def choose_system(
    args: Sequence[str], output_dir: Path | None, say: supervisor_process.Say = say
) -> up_and_down.Wanted:
    """The system config that the command line describes. Raises ConfigError."""
    return up_and_down.choose_system(args, output_dir, say=say, default=lambda: choose_output_dir(None))


def _show_plan(wanted: up_and_down.Wanted, as_json: bool) -> None:
    from daemons.submit import plan_of

    plan = plan_of(wanted.system, OutputDir(wanted.system.output_dir))
    if as_json:
        return print_json(plan.as_json())
    for line in plan.lines():
        say(line)
    return None


@contextlib.contextmanager
def shown_wait(stop: StopFlag) -> Iterator[Callable[[Workspace], None]]:
    """Show the wait for readiness: one live line a daemon on a terminal, a line at each change elsewhere."""
    screen, said = console(), list[str]()
    live = Live(console=screen, auto_refresh=False) if screen.is_terminal else None

    def look(workspace: Workspace) -> None:
        with stop_without_output(stop):
            lines = supervisor_process.waits(workspace)
            if live is not None:
                live.start()  # only now, so that earlier messages stand above it
                live.update(Text("\n".join(lines)), refresh=True)
            else:
                for line in lines:
                    if line not in said:
                        say(line)
                said[:] = lines

    try:
        yield look
    finally:
        with stop_without_output(stop):
            if live is not None:
                live.stop()


def down(
    output_dir: OutputDirOption = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds until a supervisor that does not stop is killed. Default: from the system file."),
    ] = None,
) -> None:
    """Stop all daemons of a workspace; runs are kept.

    Orchestrators may finish their batch and the trainer its step and checkpoint. Then checks that no process is left.
    A workspace that is a Slurm job ends with its job. prl up continues later.

    Example: prl down --output-dir outputs/demo
    """
    output = existing_output(output_dir)
    was_running = up_and_down.stop_workspace(output.path, timeout_s=timeout, say=say)
    say(f"{output.path}: stopped, no process is left" if was_running else f"{output.path}: nothing is running")


def status(output_dir: OutputDirOption = None, as_json: JsonOption = False, watching: WatchOption = False) -> None:
    """Show daemons, slots, runs, disk and the bottleneck.

    The last line names the process that the others wait for.

    Example: prl status --watch
    """
    path = existing_output(output_dir, may_miss=watching or as_json, may_be_empty=False).path
    reader, disk = WorkspaceReader(path), DiskReader(path)

    def view() -> RenderableType:
        if none := no_workspace(path):
            return Text(none)
        return workspace_view(reader.read(), disk.read(), read_info(reader.output))

    if as_json:
        print_json(workspace_json(reader.read(), disk.read()))
    elif watching:
        watch(view)
    else:
        console().print(view())


def logs(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="supervisor, trainer, inference, alerts, monitors, gateway, or a run's id. trainer-node1 is the "
            "trainer on its second node; with Slurm job is the job's own log, srun what Slurm complains about.",
            autocompletion=complete.log_names,
        ),
    ],
    output_dir: OutputDirOption = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print new lines as they come, until Ctrl-C.")] = False,
    num_lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Print the last N lines.")] = 50,
    grep: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Print only lines that match this regular expression.")
    ] = None,
) -> None:
    """Print the log of a daemon or of a run's orchestrator.

    Reads rotated log files too.

    Example: prl logs run_reverse -f --grep "WARNING|ERROR"
    """
    path = _log_path(existing_output(output_dir), name)
    wanted = _line_filter(grep)
    if not path.exists() and not follow:
        raise ActionError(f"log {path} not found: {name} has not been started yet")
    end = end_of_lines(path) if follow else None
    tail = FileTail(path, position=end or 0)
    begun = tail.read().lines if follow else []  # from here nothing is missed, whatever happens to the file
    for line in last_lines(path, num_lines, wanted, end=end):
        say(line)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            _follow(tail, begun, wanted)


def _follow(tail: FileTail, lines: list[bytes], wanted: Callable[[str], bool]) -> None:
    more = False
    while True:
        for line in filter(wanted, (line.decode(errors="replace") for line in lines)):
            say(line)
        if not lines and not more:
            time.sleep(FOLLOW_EVERY_S)
        found = tail.read()
        lines, more = found.lines, found.more


def _line_filter(pattern: str | None) -> Callable[[str], bool]:
    """A filter of lines as they are shown, without control characters. Raises WrongUseError."""
    if pattern is None:
        return lambda line: True
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise WrongUseError(f"invalid regular expression --grep {pattern!r}: {error}") from error
    return lambda line: search(clean_text(line)) is not None


def _log_path(output: OutputDir, name: str) -> Path:
    services = (SUPERVISOR, INFERENCE, TRAINER, *OPTIONAL, GATEWAY)
    daemon = _NODE.sub("", name)
    if name in (JOB_LOG, SRUN_LOG) or daemon in services or kind_of(daemon) == INFERENCE:
        return output.log(name)
    try:
        return existing_run(output, name).log
    except LayoutError as error:
        raise WrongUseError(f"{name!r} not found: expected {', '.join(services)} or a run's id ({error})") from error


def doctor(
    output_dir: OutputDirOption = None,
    as_json: JsonOption = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip importing torch and vLLM, which takes several seconds.")
    ] = False,
) -> None:
    """Check this machine and workspace for problems.

    Each line is ok, or a warning or broken with what to do. The exit code is 1 if something is broken.

    Example: prl doctor --output-dir outputs/demo
    """
    screen, found = console(), []

    def progress(message: str) -> None:
        if sys.stderr.isatty() and not as_json:
            complain(message)

    for check in examine(choose_output_dir(output_dir), say=progress, import_libraries=not quick):
        found.append(check)
        if not as_json:
            advice = f": {check.advice}" if check.advice else ""
            line = Text(f"{check.level:8}", style=_CHECK_STYLES[check.level])
            screen.print(
                line.append(clean_text(f"{check.name}: {check.message}{advice}"), style="default"), soft_wrap=True
            )
    num_broken = sum(check.level == "broken" for check in found)
    if as_json:
        print_json({"ok": not num_broken, "checks": [asdict(check) for check in found]})
    raise typer.Exit(1 if num_broken else 0)


def restart(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="trainer, inference, alerts, monitors, gateway, or a run's id (restarts its orchestrator).",
            autocompletion=complete.daemon_names,
        ),
    ],
    output_dir: OutputDirOption = None,
) -> None:
    """Restart one daemon.

    The daemon may finish its work first. A daemon in state failed is started again too.

    Example: prl restart inference
    """
    up_and_down.restart_daemon(existing_output(output_dir).path, name, say=say)
    say(f"{name}: restarted")


def scale_inference(output_dir: Path, replicas: int, *, reason: str = "") -> int:
    """Have so many inference servers; returns how many there were before. Raises ActionError.

    Servers that stay keep their GPUs.
    """
    output = OutputDir(Path(output_dir))
    if replicas < 1:
        raise WrongUseError(f"{replicas} inference servers: must be 1 or more; prl down stops the workspace")
    path = output.component_config(SYSTEM)
    if not path.exists():
        raise ActionError(f"{output.path} has no saved settings: start it with prl up first")
    with one_line_errors("scaling inference"):
        try:
            system = build(SystemConfig, load_toml(path), str(path))
            changed = _changed(system, replicas)
            is_up = read_workspace(output.path).supervisor_alive  # else prl up divides the GPU again
            if is_up and replicas > system.deployment.inference.replicas and up_and_down.have_one_gpu(system):
                trainer = system.trainer.gpu_share
                up_and_down.check_shares(system, replicas, trainer if trainer < 1.0 else 0.0)
            settings = [(each, merge(load_toml(each), changed)) for each in (path, output.component_config(UP))]
            for each, data in settings:
                build(SystemConfig, data, each.name)
        except ConfigError as error:
            raise ActionError(f"cannot have {replicas} inference servers: {error}") from error
        before = system.deployment.inference.replicas
        if before != replicas:
            for each, data in settings:
                write_atomic(each, tomli_w.dumps(data))
            record_act(output, "scale", None, reason=reason, detail=f"{before} -> {replicas} inference servers")
    return before


def _changed(system: SystemConfig, replicas: int) -> dict[str, Any]:
    """The settings that change. Raises ActionError when a port or a GPU is missing."""
    deployed, port = system.deployment.inference, system.inference.port
    if port and port + replicas - 1 > MAX_PORT:
        raise ActionError(f"{replicas} inference servers need ports up to {port + replicas - 1}: at most {MAX_PORT}")
    gpus, each = len(deployed.gpus), deployed.gpus_each
    if gpus and (needed := replicas * each) > gpus:
        raise ActionError(
            f"{replicas} inference servers of {each} GPUs need {needed}: deployment.inference.gpus lists {gpus}"
        )
    table: dict[str, Any] = {"replicas": replicas}
    if gpus:  # else they would be divided again
        table["gpus_per_replica"] = each
    return {"deployment": {"inference": table}}


@scale_app.command("inference")
def scale(
    replicas: Annotated[int, typer.Argument(metavar="N", help="Inference servers, 1 or more.")],
    output_dir: OutputDirOption = None,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Change how many inference servers a workspace has.

    The supervisor starts or ends servers at its next look; runs use new ones as soon as these serve, and make again
    elsewhere what one that ends has not answered. With the daemons down it holds for the next prl up.

    Example: prl scale inference 3
    """
    place = existing_output(output_dir).path
    before = scale_inference(place, replicas, reason=reason)
    is_up = read_workspace(place).supervisor_alive
    if as_json:
        print_json({"replicas": replicas, "before": before, "supervisor_alive": is_up})
    elif before == replicas:
        say(f"{place}: has {replicas} already")
    else:
        say(f"{place}: {before} -> {counted(replicas, 'inference server')}{'' if is_up else ' at the next prl up'}")


def _become(module: str, args: Sequence[str]) -> None:
    """Replace this process, so signals and the exit code are the component's own. Raises ActionError."""
    need_cpu()
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *args])


def trainer(context: typer.Context) -> None:
    """Run only the trainer, in the foreground.

    @ FILE is its config (TOML); --key.subkey VALUE overrides one field. Ctrl-C stops it.

    Example: prl trainer @ configs/reverse_text/trainer.toml --max_concurrent_runs 2
    """
    _become(module_of(TRAINER), context.args)


def orchestrator(context: typer.Context) -> None:
    """Run only one run's orchestrator, in the foreground.

    @ FILE is the run's config (TOML). Ends when the run is finished, or with Ctrl-C.

    Example: prl orchestrator @ outputs/run_reverse/control/orch.toml
    """
    _become(module_of(ORCHESTRATOR), context.args)


def inference(context: typer.Context) -> None:
    """Run only the inference server, in the foreground.

    @ FILE is its config (TOML); --key.subkey VALUE overrides one field. Ctrl-C stops it.

    Example: prl inference @ configs/reverse_text/inference.toml --port 8001
    """
    _become(module_of(INFERENCE), context.args)


class MakeBase(Passing):
    """`prl make-base`, whose help names the fields of its config."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write them; they are read from the sources, which takes too long for every start."""
        fields = walk(MakeBaseConfig, "")
        with formatter.section("What to make"):
            formatter.write_dl([(f"--{each.key}", f"{each.help} [{each.type}; {each.default}]") for each in fields])


def make_base(context: typer.Context) -> None:
    """Build a small base model that trains on a CPU.

    It is built from scratch, without a download, unless --kind names a pretrained one.

    Example: prl make-base --out models/base --seed 0
    """
    _become(MAKE_BASE_MODULE, context.args)


def fit(context: typer.Context) -> None:
    """Replace this process with that of `prl fit`. `cli` gives the command its help."""
    _become(FIT_MODULE, context.args)
