"""`python -m benchmarks.gpu`: the stages one after another, each a process of its own, then what they found.

A stage that crashes, hangs or runs out of memory costs its own figures. Each has a limit of its own, and at most what
is left of the whole; the most valuable come first.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.frame import RESULT_FORMAT_VERSION, RESULTS
from benchmarks.gpu.report import plot, table, verdicts
from prime_rl.contract.files import write_atomic
from prime_rl.utils.process import EXIT_INTERRUPTED, kill_tree
from prime_rl.utils.runtime import complain

# Eight minutes, less what it takes to end a stage that hangs.
LIMIT_S = 450.0
# The most that each takes, in seconds.
STAGES = {
    "env": 45,
    "correct": 75,
    "selfcheck": 60,
    "pass06": 120,
    "pass4": 110,
    "engine": 60,
    "system": 200,
    "vllm": 200,
}
# For its stacks, where a stage hangs; and then, or after Ctrl-C, to stop what it started.
GRACE_S, END_S = 5.0, 25.0
INTERRUPTED = "interrupted"


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 all was measured, 1 something was not, 2 wrong use or no GPU, 130 after Ctrl-C."""
    args = make_parser().parse_args(argv)
    if not args.tiny and (reason := _no_gpu()):
        complain("gpu-check", f"{reason}; --tiny tries the check itself on a CPU")
        return 2
    out = args.out or (Path(tempfile.mkdtemp(prefix="gpu-check-")) if args.tiny else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    console = Console(file=sys.stderr if args.json else sys.stdout, highlight=False, markup=False, soft_wrap=True)
    console.print(f"results: {out}{', of tiny shapes on a CPU: they say nothing of a card' * args.tiny}")
    found: dict[str, dict[str, Any]] = {}
    deadline_s = time.monotonic() + args.limit
    for name in [name for name in args.only or STAGES if not (args.tiny and name == "vllm")]:
        limit_s = min(args.stage_limit or STAGES[name], deadline_s - time.monotonic())
        console.print(f"{name}: at most {max(0.0, limit_s):.0f} s", style="bold")
        problem = _run(name, out, limit_s, args)
        found[name] = _result(out / f"gpu_{name}.json", problem, {"stage": name, "tiny": args.tiny})
        if problem:
            console.print(f"{name}: {problem}", style="bold red")
        if problem == INTERRUPTED:
            break
    judged = verdicts(found, tiny=args.tiny)
    if args.json:
        asked = [{"figure": v.asked.what, "asked": v.asked.range, "value": v.value, "met": v.met} for v in judged]
        print(json.dumps({"version": RESULT_FORMAT_VERSION, "tiny": args.tiny, "asked": asked, "stages": found}))
    else:
        card = next((each["machine"]["card"] for each in found.values() if "machine" in each), "no card")
        console.print(f"\n{card}, beside what is asked of one H100 (docs/benchmarks.md#gpu)")
        console.print(table(judged) if judged else "nothing is asked of these stages")
        print(*plot(found), sep="\n")
    is_missing = any(v.value is None and v.met is False for v in judged)
    is_whole = not is_missing and not any(each["problem"] or each["errors"] for each in found.values())
    return EXIT_INTERRUPTED if INTERRUPTED in [each["problem"] for each in found.values()] else int(not is_whole)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="What a GPU does with this project, beside what is asked of one."
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU: tries the check itself")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="of all (default: 450)")
    parser.add_argument("--stage-limit", type=float, metavar="SECONDS", help="of each stage, in place of its own")
    parser.add_argument("--only", nargs="+", choices=STAGES, metavar="STAGE", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of the results (default: benchmarks/results)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser


def _no_gpu() -> str | None:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU"
    return None if torch.cuda.is_available() else f"no GPU can be used (torch {torch.__version__}, built for {built})"


def _run(name: str, out: Path, limit_s: float, args: argparse.Namespace) -> str | None:
    """Run one stage to its end; returns why it did not end well."""
    (out / f"gpu_{name}.json").unlink(missing_ok=True)
    if limit_s < 1:
        return "no time left"
    argv = [sys.executable, "-m", "benchmarks.gpu.stage", name, str(out), f"{limit_s:.1f}", *["--tiny"] * args.tiny]
    # As the trainer has it; nothing is fetched; and tiny products take one core.
    allocator = {} if name in ("system", "vllm") else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    threads = {"OMP_NUM_THREADS": "1"} if args.tiny else {}
    environment = {**allocator, **os.environ, **threads, "HF_HUB_OFFLINE": "1"}
    # In a session of its own: Ctrl-C comes here alone, and the stage is told in its turn.
    child = subprocess.Popen(argv, env=environment, stdout=sys.stderr if args.json else None, start_new_session=True)
    try:
        exit_code = child.wait(limit_s + GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(END_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            kill_tree(child.pid)
            child.wait()
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else f"took more than {limit_s:.0f} s"
    if exit_code < 0:
        return f"ended by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}" if exit_code else None


def _result(path: Path, problem: str | None, head: dict[str, Any]) -> dict[str, Any]:
    """What a stage has written, or nothing; with the `problem`, in the file too."""
    empty = {"version": RESULT_FORMAT_VERSION, **head, "entries": {}, "errors": {}}
    found = {**(json.loads(path.read_text(encoding="utf-8")) if path.exists() else empty), "problem": problem}
    write_atomic(path, json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
