"""`prl`: registers the commands and turns errors into one line and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from daemons.actions import ActionError
from daemons.commands import acts, alerts, config, deploy, envs, lifecycle, multinode, results, serving
from daemons.commands.common import FILE_AND_OPTIONS, Passing, complain, flags_help
from daemons.commands.runs import runs_app
from daemons.demo import demo
from daemons.launchers.base import LaunchError
from prime_rl import __version__
from prime_rl.configs.base import ConfigError
from prime_rl.configs.system import FIT_EXAMPLE, fit_parser
from prime_rl.contract.layout import LayoutError
from prime_rl.utils.text import one_line

app = typer.Typer(
    name="prl",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# In the order of `prl --help`.
app.command(cls=Passing)(demo)
app.command(cls=Passing, options_metavar=FILE_AND_OPTIONS)(lifecycle.up)
app.command()(lifecycle.down)
app.command()(lifecycle.status)
app.command()(lifecycle.logs)
app.command()(lifecycle.restart)
app.add_typer(lifecycle.scale_app, name="scale")
app.add_typer(deploy.deploy_app, name="deploy")
app.command()(lifecycle.doctor)
app.add_typer(config.config_app, name="config")
alerts.register(app)
app.command()(results.usage)
runs_app.command()(acts.evict)
runs_app.command()(acts.readmit)
runs_app.command()(acts.rollback)
runs_app.command()(acts.delete)
runs_app.command()(acts.undelete)
runs_app.command()(acts.purge)
runs_app.command()(acts.pause)
runs_app.command("continue")(acts.go_on)
runs_app.command("set")(acts.set_keys)
runs_app.command()(acts.apply)
runs_app.command()(acts.restore)
runs_app.command()(acts.fork)
runs_app.command()(acts.sweep)
runs_app.command()(results.export)
runs_app.command()(results.export_metrics)
runs_app.command()(results.best)
runs_app.command()(results.diff)
app.command()(results.chat)
app.command("eval")(serving.eval_targets)
app.command()(serving.serve)
app.add_typer(runs_app, name="runs")
app.add_typer(envs.env_app, name="env")
fit_help = flags_help(lifecycle.FIT_HELP, f"prl fit {FIT_EXAMPLE}", fit_parser())
app.command(help=fit_help, cls=Passing, options_metavar=FILE_AND_OPTIONS)(lifecycle.fit)
app.command(cls=Passing, options_metavar=FILE_AND_OPTIONS)(lifecycle.trainer)
app.command(cls=Passing, options_metavar=FILE_AND_OPTIONS)(lifecycle.orchestrator)
app.command(cls=Passing, options_metavar=FILE_AND_OPTIONS)(lifecycle.inference)
app.command("make-base", cls=lifecycle.MakeBase)(lifecycle.make_base)
app.add_typer(multinode.multinode_app, name="multinode")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"prl {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when a command fails.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Many RL runs on one model, from one terminal.

    A workspace is one folder with runs in it. Its daemons (a trainer, an inference server, one orchestrator per run)
    work in the background.

    \b
    prl demo                 try it: three runs on two slots, on this machine
    prl up @ SYSTEM.toml     start the workspace's trainer and inference server
    prl runs add RUN.toml    add a run: one experiment, one TOML file
    prl status, prl-tui      watch the runs
    prl down                 stop the workspace

    Every command has --help with an example.
    """  # noqa: D301 (click reads \b)


def run(argv: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    debug = "--debug" in argv
    try:
        app(args=[arg for arg in argv if arg != "--debug"], prog_name="prl")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except (ActionError, LaunchError) as error:
        return _fail(error, error.exit_code, debug)
    except (ConfigError, LayoutError) as error:
        return _fail(error, 2, debug)
    except (OSError, RuntimeError) as error:
        return _fail(error, 1, debug)
    except Exception as error:  # a bug, caught at the one boundary above all commands
        if debug:
            raise
        complain(one_line(f"unexpected {type(error).__name__}: {error}; run prl --debug ... for the traceback"))
        return 1
    return 0


def _fail(error: Exception, exit_code: int, debug: bool) -> int:
    if debug:
        raise error
    complain(str(error))
    return exit_code


def main() -> None:
    """Run the command line and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character shows "?"
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
