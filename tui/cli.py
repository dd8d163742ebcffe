"""Entry of `prl-tui`: reads the command line, then loads the app. Nothing heavy is imported before that."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prl-tui", description="See all runs of a house, and act on them.")
    parser.add_argument("output_dir", nargs="?", default=os.environ.get("PRL_OUTPUT_DIR") or "outputs", type=Path)
    parser.add_argument("--read-only", action="store_true", help="see everything, change nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0 after a quit, 130 after Ctrl-C, 2 for wrong use."""
    args = make_parser().parse_args(argv)
    if not args.output_dir.is_dir():
        print(
            f"prl-tui: no folder {args.output_dir}: name the output directory, or start a house with prl up",
            file=sys.stderr,
        )
        return 2
    # What is made while starting stays: looking through it again and again for garbage delays the first picture.
    gc.disable()
    from tui.app import PrlApp
    from tui.memory import default_path

    app = PrlApp(args.output_dir, read_only=args.read_only, memory_path=default_path())
    app.run()
    return app.return_code or 0
