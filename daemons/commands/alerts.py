"""`prl alerts`: what is wrong now, what people have said about it, and whether alerts arrive where they should."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from daemons.alerts.targets import message, sentence
from daemons.commands.common import (
    JsonOption,
    OutputDirOption,
    existing_output,
    parse_duration,
    print_json,
    say,
    short_time,
)
from daemons.errors import WrongUseError
from daemons.quiet import (
    OpenIncident,
    Silence,
    acknowledge,
    acknowledgement,
    mute,
    muting,
    name_of,
    read_open,
    read_silences,
    require_alerts,
    subjects,
    unmute,
)
from daemons.specs import ALERTS
from prime_rl.configs.base import load_config
from prime_rl.configs.reports import ALERT_KINDS, AlertsConfig
from prime_rl.contract.layout import OutputDir

ReasonOption = Annotated[str, typer.Option(metavar="TEXT", help="Why; shown by prl alerts, and in logs/audit.jsonl.")]


def open_names(context: typer.Context, incomplete: str) -> list[str]:
    """Completions for `prl alerts ack`: the open incidents."""
    return [each for each in map(name_of, read_open(_output(context)).values()) if each.startswith(incomplete)]


def mutable_names(context: typer.Context, incomplete: str) -> list[str]:
    """Completions for `prl alerts mute`: the kinds of incidents, then runs, daemons and nodes."""
    try:
        found = [*ALERT_KINDS, *sorted(subjects(_output(context)))]
    except OSError:
        return []
    return [each for each in found if each.startswith(incomplete)]


def muted_names(context: typer.Context, incomplete: str) -> list[str]:
    """Completions for `prl alerts unmute`: what is muted."""
    silences = read_silences(_output(context), time.time())
    return [each.name for each in silences if each.action == "muted" and each.name.startswith(incomplete)]


WhatArgument = Annotated[
    str,
    typer.Argument(
        metavar="WHAT", help="A kind, a run, a daemon, or KIND:RUN (docs/alerts.md).", autocompletion=mutable_names
    ),
]


def alerts(
    context: typer.Context,
    output_dir: OutputDirOption = None,
    as_json: JsonOption = False,
    test: Annotated[bool, typer.Option("--test", help="Send a test message to every target.")] = False,
) -> None:
    """Show what is wrong in a workspace with [alerts], test where alerts go, acknowledge and mute.

    Example: prl alerts --test
    """
    if context.invoked_subcommand is not None:
        return
    output = existing_output(output_dir)
    require_alerts(output)
    if test:
        _test(output, as_json)
        return
    found = sorted(read_open(output).values(), key=lambda each: each.since)
    now = time.time()
    silences = read_silences(output, now)
    if as_json:
        print_json(
            {"open": [_as_json(each, silences) for each in found], "said": list(map(_silence_as_json, silences))}
        )
        return
    for incident in found:
        say(f"{short_time(now - incident.since)} ago: {sentence(incident)}{_note(incident, silences, now)}")
    for silence in silences:
        if silence.action == "muted":
            say(f"muted: {silence.name}{_details(silence, now)}")
    if not found:
        say(f"{output.path}: nothing is wrong")


def _as_json(incident: OpenIncident, silences: Sequence[Silence]) -> dict[str, Any]:
    acknowledged, muted = acknowledgement(incident, silences), muting(incident, silences)
    return {
        **msgspec.to_builtins(incident),
        "name": name_of(incident),
        "acknowledged": acknowledged and _silence_as_json(acknowledged),
        "muted": muted and _silence_as_json(muted),
    }


def _silence_as_json(silence: Silence) -> dict[str, Any]:
    return {"name": silence.name, **msgspec.to_builtins(silence)}


def _note(incident: OpenIncident, silences: Sequence[Silence], now: float) -> str:
    found = [acknowledgement(incident, silences), muting(incident, silences)]
    return "".join(f" [{silence.action}{_details(silence, now)}]" for silence in found if silence is not None)


def _details(silence: Silence, now: float) -> str:
    left = f" for {short_time(silence.until - now)} more" if silence.until is not None else ""
    reason = f": {silence.reason}" if silence.reason else ""
    return f"{left} by {silence.who}{reason}"


def ack(
    context: typer.Context,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="KIND:RUN as in prl alerts --json, or a run or daemon.", autocompletion=open_names
        ),
    ],
    output_dir: OutputDirOption = None,
    reason: ReasonOption = "",
) -> None:
    """Acknowledge what is wrong: it is known, and is not reported again. Its end still is.

    It stays in every list. What comes back within ten minutes of its end is the same.

    Example: prl alerts ack run_failed:run_reverse --reason "the disk was full"
    """
    output = _output(context, output_dir)
    for name in names:
        new = acknowledge(output.path, name, reason=reason)
        say(f"{name}: already acknowledged" if not new else f"acknowledged {', '.join(map(name_of, new))}")


def mute_alerts(
    context: typer.Context,
    what: WhatArgument,
    output_dir: OutputDirOption = None,
    duration: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="Such as 30m or 2h. Default: until prl alerts unmute.")
    ] = None,
    reason: ReasonOption = "",
) -> None:
    """Send nothing of a kind, a run or a daemon.

    What is still wrong when the mute ends is reported then.

    Example: prl alerts mute run_stalled --for 2h --reason "the file server restarts"
    """
    for_s = parse_duration(duration) if duration is not None else None
    silence = mute(_output(context, output_dir).path, what, for_s=for_s, reason=reason)
    say(f"muted {silence.name} " + (f"for {short_time(for_s)}" if for_s else f"until prl alerts unmute {silence.name}"))


def unmute_alerts(
    context: typer.Context,
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="As it was muted; see prl alerts.", autocompletion=muted_names)
    ],
    output_dir: OutputDirOption = None,
    reason: ReasonOption = "",
) -> None:
    """End a mute; what is still wrong is reported.

    Example: prl alerts unmute run_stalled
    """
    ended = unmute(_output(context, output_dir).path, what, reason=reason)
    say(f"unmuted {what}" if ended else f"{what}: not muted")


def _output(context: typer.Context, output_dir: Path | None = None) -> OutputDir:
    """--output-dir may stand before the name of the subcommand, or after it."""
    before = context.parent.params.get("output_dir") if context.parent else None
    return existing_output(output_dir or context.params.get("output_dir") or before)


def _test(output: OutputDir, as_json: bool) -> None:
    from daemons.alerts.targets import TargetError, dead_man, message_targets

    config = load_config(AlertsConfig, output.component_config(ALERTS))
    try:
        targets = message_targets(config, os.environ)
        heart = dead_man(config, os.environ)
    except TargetError as error:
        raise WrongUseError(str(error)) from error
    now = time.time()
    note = message(output.path, [OpenIncident("test", "prl alerts --test", "no action is needed", now)], [], now)
    found = [(name, _error(send, note)) for name, send in [*targets, *([heart] if heart else [])]]
    if as_json:
        print_json({"sent": [{"target": target, "error": why} for target, why in found]})
    for target, why in [] if as_json else found:
        say(f"{target}: " + (f"failed: {why}" if why else "sent"))
    if not found and not as_json:
        say("no targets: set webhooks, apprise or dead_man_url in [alerts]")
    raise typer.Exit(1 if any(why for _, why in found) else 0)


def _error(send: Any, note: dict[str, Any]) -> str | None:
    try:
        send(note)
    except Exception as error:  # whatever a target's library raises
        return type(error).__name__
    return None


def register(app: typer.Typer) -> None:
    """Add the group `prl alerts`; without a command it runs `alerts`."""
    group = typer.Typer(invoke_without_command=True, callback=alerts)
    group.command("ack")(ack)
    group.command("mute")(mute_alerts)
    group.command("unmute")(unmute_alerts)
    app.add_typer(group, name="alerts")
