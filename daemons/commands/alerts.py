"""`prl alerts`: what is wrong now, and whether alerts arrive where they should."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import typer

from daemons.alerts.incident_file import OpenIncident, read_open
from daemons.alerts.messages import message, sentence
from daemons.commands.common import (
    JsonOption,
    OutputDirOption,
    UsageError,
    check_readable,
    choose_output,
    print_json,
    say,
    short_time,
)
from daemons.specs import ALERTS
from prime_rl.configs.alerts import AlertsConfig
from prime_rl.configs.base import load_config
from prime_rl.contract.layout import OutputDir

NONE_SET = "no alerts in the system file of {}: add [alerts] and run prl up again (docs/alerts.md)"


@dataclass(frozen=True)
class Sent:
    """Whether a test message was sent to a target; `error` is None then."""

    target: str
    error: str | None


def alerts(
    output_dir: OutputDirOption = None,
    as_json: JsonOption = False,
    test: Annotated[bool, typer.Option("--test", help="Send a test message to every target.")] = False,
) -> None:
    """Show what is wrong in a workspace with [alerts], or test where alerts go.

    Example: prl alerts --test
    """
    output = choose_output(output_dir)
    check_readable(output.path)
    if not output.component_config(ALERTS).exists():
        raise UsageError(NONE_SET.format(output.path))
    if test:
        _test(output, as_json)
        return
    found = sorted(read_open(output).values(), key=lambda each: each.since)
    if as_json:
        print_json({"open": msgspec.to_builtins(found)})
    for incident in [] if as_json else found:
        say(f"{short_time(time.time() - incident.since)} ago: {sentence(incident)}")
    if not found and not as_json:
        say(f"{output.path}: nothing is wrong")


def _test(output: OutputDir, as_json: bool) -> None:
    from daemons.alerts.targets import TargetError, dead_man, message_targets

    config = load_config(AlertsConfig, output.component_config(ALERTS))
    try:
        targets = message_targets(config, os.environ)
        heart = dead_man(config, os.environ)
    except TargetError as error:
        raise UsageError(str(error)) from error
    now = time.time()
    note = message(output.path, [OpenIncident("test", "prl alerts --test", "no action is needed", now)], [], now)
    found = [_try(name, send, note) for name, send in [*targets, *([heart] if heart else [])]]
    if as_json:
        print_json({"sent": [{"target": each.target, "error": each.error} for each in found]})
    for each in [] if as_json else found:
        say(f"{each.target}: " + (f"failed: {each.error}" if each.error else "sent"))
    if not found and not as_json:
        say("no targets: set webhooks, apprise or dead_man_url in [alerts]")
    raise typer.Exit(1 if any(each.error for each in found) else 0)


def _try(name: str, send: Any, note: dict[str, Any]) -> Sent:
    try:
        send(note)
    except Exception as error:  # whatever a target's library raises
        return Sent(name, type(error).__name__)
    return Sent(name, None)


def register(app: typer.Typer) -> None:
    app.command()(alerts)
