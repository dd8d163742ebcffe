"""`prl runs export|diff` and `prl chat`: what came out of runs."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from daemons.chat import BASE, DEFAULT_MAX_TOKENS, Chat, ChatSettings
from daemons.commands import complete
from daemons.commands.common import (
    JsonOption,
    OutputDirOption,
    check_readable,
    choose_output_dir,
    complain,
    console,
    make_table,
    print_json,
    say,
)
from daemons.differences import Difference, diff_runs
from daemons.errors import ActionError
from daemons.exports import export_run
from prime_rl.utils.text import size_text

RunArgument = Annotated[
    str, typer.Argument(metavar="ID", help="A run, such as run_reverse.", autocompletion=complete.run_ids)
]
QUIT, RESET = "/quit", "/reset"


def export(
    run_id: RunArgument,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The new folder; its parent must exist.")],
    output_dir: OutputDirOption = None,
    step: Annotated[int | None, typer.Option(min=0, help="The version. Default: the newest on disk.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into the base model.")] = False,
    push: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="Push it to the Hugging Face hub too; a new repository is private."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check only; write nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a version of a run as a PEFT adapter, or with --merge as a whole model, with a model card.

    The folder appears complete or not at all. prl runs show ID lists checkpoints; the newest versions are there too.

    Example: prl runs export run_reverse --merge --out reverse-model
    """
    progress = (lambda message: None) if as_json else say
    done = export_run(
        choose_output_dir(output_dir),
        run_id,
        out,
        step=step,
        merge=merge,
        push=push,
        dry_run=dry_run,
        on_progress=progress,
    )
    if as_json:
        print_json({"export": {**asdict(done), "out": str(done.out), "dry_run": dry_run}})
    elif dry_run:
        say(f"would write version {done.step} of {run_id} ({done.kind}) to {done.out}")
    else:
        say(
            f"wrote {done.out} ({done.kind}, {size_text(done.num_bytes)})"
            + (f"; pushed to {done.url}" if done.url else "")
        )


def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="A run.", autocompletion=complete.run_ids)],
    other: Annotated[str, typer.Argument(metavar="B", help="Another run.", autocompletion=complete.run_ids)],
    output_dir: OutputDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what differs between two runs, in config and in result.

    A default equals the same value in a file. reward is the mean of the last 10 steps, tokens are those trained on,
    hours those between the first and the last step.

    Example: prl runs diff run_a run_b
    """
    found = diff_runs(check_readable(choose_output_dir(output_dir)), one, other)
    if as_json:
        print_json({"runs": found.run_ids, "config": _rows_json(found.config), "result": _rows_json(found.result)})
        return
    screen = console()
    for name, rows in (("config", found.config), ("result", found.result)):
        if rows:
            columns = [name, *found.run_ids]
            screen.print(make_table(columns, [[row.name, *map(_shown, row.values)] for row in rows]))
        else:
            say(f"{name}: no difference")


def _rows_json(rows: tuple[Difference, ...]) -> list[dict[str, Any]]:
    return [{"name": row.name, "values": row.values} for row in rows]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def chat(
    target: Annotated[
        str,
        typer.Argument(
            metavar="ID[@vN]", help=f"A run (its newest version), RUN@vN, or {BASE}.", autocompletion=complete.versions
        ),
    ],
    output_dir: OutputDirOption = None,
    system: Annotated[str, typer.Option(metavar="TEXT", help="A system prompt.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = DEFAULT_MAX_TOKENS,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="0 always takes the likeliest token. Default: the server's.")
    ] = None,
) -> None:
    """Talk to a version of a run through the running inference server.

    /reset begins a new conversation, /quit or Ctrl-D ends the chat, Ctrl-C an answer. From a pipe each line is a
    question, and only answers are printed.

    Example: prl chat run_reverse --temperature 0
    """
    for name in (signal.SIGTERM, signal.SIGHUP):  # end as with Ctrl-C, which unloads the version
        signal.signal(name, signal.default_int_handler)
    settings = ChatSettings(system, max_tokens, temperature)
    with Chat(check_readable(choose_output_dir(output_dir)), target, settings) as talk:
        if sys.stdin.isatty():
            _talk(talk)
        else:
            for line in _lines():
                _answer(talk, line)


def _lines() -> Iterator[str]:
    for line in sys.stdin:
        if line.strip():
            yield line.strip()


def _talk(talk: Chat) -> None:
    """Questions from a terminal. An answer that fails, or is ended by Ctrl-C, does not end the chat."""
    import readline  # noqa: F401  # lines can be edited and repeated

    label = talk.label
    say(f"{label}: {RESET} begins a new conversation, {QUIT} ends")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        if line == QUIT:
            return
        if line == RESET:
            talk.reset()
        elif line:
            try:
                _answer(talk, line)
                if talk.label != label:  # whole weights, and the run has published newer ones
                    label = talk.label
                    say(f"answered by {label}")
            except KeyboardInterrupt:
                talk.stop()
                print(flush=True)
            except ActionError as error:
                complain(str(error))


def _answer(talk: Chat, question: str) -> None:
    with contextlib.closing(talk.answer(question)) as parts:
        for part in parts:
            print(part, end="", flush=True)
    print(flush=True)


def register(app: typer.Typer, runs_app: typer.Typer) -> None:
    """Add `export` and `diff` to `prl runs`, and `chat` to `prl`."""
    for command in (export, diff):
        runs_app.command()(command)
    app.command()(chat)
