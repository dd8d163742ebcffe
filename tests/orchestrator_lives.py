"""Lives of the real orchestrator, forked from one process that has loaded it; killed with SIGKILL where a test asks.

    python -m tests.orchestrator_lives          one life (JSON) a line in, one answer a line out

A life is `{"toml", "point"}`. At a point the child wraps one function of the orchestrator, and kills itself before,
after or in the middle of a call. The answer is the exit code (negative: a signal). The names of the points stand in
docs/durability.md too, with what each kill costs.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S

# No life is longer, whatever it waits for.


def before(real: Any, *args: Any, **kwargs: Any) -> None:
    die()


def after(real: Any, *args: Any, **kwargs: Any) -> None:
    real(*args, **kwargs)
    die()


async def before_awaiting(real: Any, *args: Any, **kwargs: Any) -> None:
    die()


async def after_awaiting(real: Any, *args: Any, **kwargs: Any) -> None:
    await real(*args, **kwargs)
    die()


def half_a_line(real: Any, path: Path, line: str) -> None:
    with path.open("ab") as file:
        file.write(line.encode()[: len(line) // 2])
    die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class KillPoint:
    """`target` is "module:attribute.path"; its `nth` call that `matches` is replaced by `instead`."""

    target: str
    instead: Callable[..., Any]
    nth: int = 1
    matches: Callable[..., bool] = lambda *args, **kwargs: True


_ORCHESTRATOR = "prime_rl.orchestrator"
POINTS = {
    "before the first group is finished": KillPoint(f"{_ORCHESTRATOR}.scheduler:GroupLedger.finish", before),
    "while groups are generated": KillPoint(f"{_ORCHESTRATOR}.scheduler:GroupLedger.finish", before, nth=6),
    "before the state of a checkpoint": KillPoint(f"{_ORCHESTRATOR}.batch:save_state", before),
    "between a state and its batch": KillPoint(f"{_ORCHESTRATOR}.batch:save_state", after),
    "before a batch file gets its name": KillPoint(
        "os:link", before, nth=3, matches=lambda source, target, **folders: Path(target).name == "rollouts.msgpack"
    ),
    "between a batch and its line of metrics": KillPoint(f"{_ORCHESTRATOR}.batch:publish_batch", after, nth=2),
    "inside a line of metrics": KillPoint(f"{_ORCHESTRATOR}.metrics:append_line", half_a_line, nth=2),
    "while an adapter is loaded": KillPoint(
        f"{_ORCHESTRATOR}.publication:AdapterPublication.publish", after_awaiting, nth=2
    ),
    "while an old adapter is unloaded": KillPoint(
        f"{_ORCHESTRATOR}.publication:AdapterPublication._unload", before_awaiting
    ),
    "while the last version is waited for": KillPoint(
        f"{_ORCHESTRATOR}.scheduler:Scheduler.wait_for_version", before_awaiting
    ),
}


def arm(point: KillPoint) -> None:
    """Put the point into place in this process."""
    module, _, path = point.target.partition(":")
    *parents, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    real, num_calls = getattr(owner, name), 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += bool(point.matches(*args, **kwargs))
        if num_calls == point.nth and point.matches(*args, **kwargs):
            return point.instead(real, *args, **kwargs)
        return real(*args, **kwargs)

    setattr(owner, name, wrapped)


class Lives:
    """The parent, from a test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def live(self, toml: Path, point: str | None = None) -> int:
        """One life, to its end; returns its exit code."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"toml": str(toml), "point": point}) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def lives() -> Iterator[Lives]:
    command = [sys.executable, "-m", "tests.orchestrator_lives"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    ) as process:
        yield Lives(process)  # the end of its input ends it


def _child(toml: str, point: str | None) -> None:
    """Never returns."""
    from prime_rl.orchestrator import policy
    from prime_rl.orchestrator.orchestrator import main

    policy.CLOSE_TIMEOUT_S = PATIENCE_S  # the server is in the test's process, which may stand still
    signal.alarm(int(PATIENCE_S))
    os.dup2(2, 1)  # the parent's answers go to the other
    code = 1
    try:
        if point is not None:
            arm(POINTS[point])
        code = main(["@", toml])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    for point in POINTS.values():  # all that a child would load otherwise, each for itself
        importlib.import_module(point.target.partition(":")[0])
    importlib.import_module(f"{_ORCHESTRATOR}.orchestrator")
    for line in sys.stdin:
        life = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(life["toml"], life["point"])
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
