"""Start a process in its own session, and run one to its end.

It has the marks `PRL_OUTPUT_DIR` and `PRL_DAEMON` in its environment and its output in a log. `launchers.local` finds
and ends what carries the marks.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from prime_rl.contract.files import make_folder, open_append, read_end
from prime_rl.utils.secrets import handed_over

WORKSPACE_MARK = "PRL_OUTPUT_DIR"
DAEMON_MARK = "PRL_DAEMON"
# Decides which GPUs daemons see beside their command lines. `prl up` saves it: a later one comes from another shell.
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
# torchrun's name for its option `--node-rank` in the environment.
NODE_VARIABLE = "PET_NODE_RANK"
# After SIGKILL the kernel needs moments; more means a process that hangs in the kernel (a dead file server).
KILL_WAIT_S = 10.0
CHILD_POLL_S = 0.1


def daemon_environment(output_dir: Path, name: str) -> dict[str, str]:
    """Environment of a daemon before keys are taken out: ours and the marks.

    SPT_NOENV: a changed process title must not overwrite the marks. PYTHONUTF8: text files are UTF-8, whatever the
    locale.
    """
    marks = {WORKSPACE_MARK: str(output_dir.resolve()), DAEMON_MARK: name}
    return {**os.environ, **marks, "SPT_NOENV": "1", "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}


def visible_devices(visible: str, devices: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES of a daemon: its `devices`, counted among those that are `visible`."""
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return ",".join(names[number] if number < len(names) else str(number) for number in devices)


def spawn(
    argv: Sequence[str],
    log: Path,
    output_dir: Path,
    name: str,
    *,
    pass_fds: Collection[int] = (),
    keys: Collection[str] = (),
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start `argv` in a new session, without a terminal, with its output appended to `log`.

    `keys` names the variables whose API keys it is handed, in files without a name; it gets no others.

    Raises OSError (FileRefused when the log or its folder is something else); the log's folder is made but not its
    parents, so the folder of a deleted run is not made again.
    """
    make_folder(log.parent)
    environ = daemon_environment(output_dir, name)
    with open_append(log) as output, handed_over(environ, keys) as (environ, key_fds):
        output.write(log_header(name, argv).encode())
        output.flush()
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environ,
            pass_fds=(*pass_fds, *key_fds),
            cwd=cwd,
        )


_HEADER = "=== start of "


def log_header(name: str, argv: Sequence[str]) -> str:
    """The line that begins each start of a daemon in its log; `log_tail` looks for it."""
    return f"{_HEADER}{name} at {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}: {' '.join(argv)}\n"


def log_tail(log: Path, num_lines: int = 20, *, limit: int = 64_000, this_start_only: bool = True) -> list[str]:
    """The last lines of a log, of its last start only; [] without a log. Reads at most `limit` bytes."""
    try:
        lines = read_end(log, limit).decode(errors="replace").splitlines()
    except OSError:
        return []
    if this_start_only:
        starts = [number for number, line in enumerate(lines) if line.startswith(_HEADER)]
        lines = lines[starts[-1] + 1 :] if starts else lines
    return lines[-num_lines:] if num_lines else []


def run_child(argv: Sequence[str], stop: Callable[[], bool], **options: Any) -> int | None:
    """Run `argv` to its end, whatever keys are pressed; returns its exit code. None: `stop()` came first, and ended it.

    Args:
        options: of `subprocess.Popen`.
    """
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True, **options)
    try:
        while child.poll() is None and not stop():
            time.sleep(CHILD_POLL_S)
    finally:
        if child.poll() is None:
            child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=KILL_WAIT_S)
        if child.poll() is None:
            child.kill()
            child.wait()
    return None if stop() else child.returncode


def python_module(module: str, *args: str) -> list[str]:
    """argv of `python -m module args`, with this very interpreter."""
    return [sys.executable, "-m", module, *args]
