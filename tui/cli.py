"""Entry of `prl-tui`: reads the command line, then loads the app. Nothing heavy is imported before that."""

from __future__ import annotations

import argparse
import gc
import os
import select
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from daemons.start import quiet_interrupts
from prime_rl.utils.process import EXIT_TERMINAL_GONE
from prime_rl.utils.runtime import missing, no_terminal

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Beside the usual ports of inference (8000) and of other web tools.
DEFAULT_PORT = 8765
SWITCH_S = 0.001


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line; the default workspace depends on the environment."""
    parser = argparse.ArgumentParser(
        prog="prl-tui",
        description="Watch all runs of a workspace in the terminal, and act on them.",
        epilog="Example: prl-tui outputs --read-only",
    )
    default = os.environ.get("PRL_OUTPUT_DIR") or "outputs"
    workspace = "the workspace (default: PRL_OUTPUT_DIR, else outputs)"
    parser.add_argument("output_dir", nargs="?", default=default, type=Path, help=workspace)
    parser.add_argument("--read-only", action="store_true", help="show everything, change nothing")
    # Of prl demo: what q does then stands in the header when all runs are done.
    parser.add_argument("--demo", action="store_true", help=argparse.SUPPRESS)
    browser = parser.add_argument_group("in a browser")
    browser.add_argument("--serve", action="store_true", help="serve it to a browser on this machine, read-only")
    browser.add_argument(
        "--port", type=int, help=f"with --serve: port to listen on (default {DEFAULT_PORT}; 0: any free port)"
    )
    browser.add_argument("--host", help="with --serve: loopback address to listen on (default 127.0.0.1)")
    browser.add_argument("--allow-actions", action="store_true", help="with --serve: allow actions from the browser")
    return parser


def wrong_use(args: argparse.Namespace) -> str | None:
    """Contradictory or refused arguments, in one line; None when all are fine."""
    if not args.output_dir.is_dir():
        return f"workspace {args.output_dir} not found: give another folder, or create this one with prl up"
    if not args.serve:
        given = [name for name in ("port", "host", "allow_actions") if getattr(args, name)]
        if given:
            return f"--{given[0].replace('_', '-')} requires --serve"
        # A browser's window is drawn through pipes.
        absent = None if "TEXTUAL_DRIVER" in os.environ else no_terminal()
        return f"{absent}; as text: prl status --output-dir {args.output_dir}" if absent else None
    if args.read_only and args.allow_actions:
        return "--read-only and --allow-actions exclude each other: use one of them"
    if args.host is not None and args.host not in LOOPBACK:
        return (
            f"invalid host {args.host}: must be {', '.join(LOOPBACK)}, since there is no password; from another "
            f"machine use ssh -L {args.port or DEFAULT_PORT}:127.0.0.1:{args.port or DEFAULT_PORT} THIS_MACHINE"
        )
    if args.port is not None and not 0 <= args.port <= 65535:
        return f"invalid port {args.port}: must be 0 to 65535"
    return (sentence := missing("serve", "textual_serve")) and f"--serve: {sentence}"


def end_with_the_terminal() -> None:
    """End at once when the terminal goes away: not everything that closes one sends SIGHUP to who draws on it."""

    def wait() -> None:
        closed = select.poll()
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            closed.register(stream, 0)  # nothing but that it is closed
        closed.poll()
        os._exit(EXIT_TERMINAL_GONE)

    if sys.stdin.isatty():
        threading.Thread(target=wait, name="terminal", daemon=True).start()


def main(argv: Sequence[str] | None = None) -> int:
    """0 after a quit, 130 after Ctrl-C, 143 after SIGTERM, 2 for wrong usage, 1 when the port is not available."""
    args = make_parser().parse_args(argv)
    if problem := wrong_use(args):
        from prime_rl.utils.runtime import complain

        complain("prl-tui", problem)
        return 2
    if args.serve:
        from tui.serve import serve

        port = DEFAULT_PORT if args.port is None else args.port
        return serve(args.output_dir, host=args.host or LOOPBACK[0], port=port, allow_actions=args.allow_actions)
    # What is made while starting stays: looking through it again and again for garbage delays the first picture.
    gc.disable()
    # A key passes through three threads, and each waits this long for the interpreter while files are parsed.
    sys.setswitchinterval(SWITCH_S)
    with quiet_interrupts():
        from tui.app import PrlApp
        from tui.fmt import plain_glyphs
        from tui.memory import default_path
        from tui.readers.machine import find

    glyphs = plain_glyphs(os.environ.get("TERM", ""), sys.stdout.encoding or "utf-8")
    app = PrlApp(
        args.output_dir,
        read_only=args.read_only,
        memory_path=default_path(),
        glyphs=glyphs,
        is_demo=args.demo,
        examine=find,
    )
    end_with_the_terminal()
    app.run()
    return app.return_code or 0
