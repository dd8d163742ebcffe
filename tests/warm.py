"""Commands in forks of a process that has loaded their module once: each costs what it does, and no imports.

    python -m tests.warm MODULE FD     the parent of such forks: it takes requests from a socket until that is closed

A fork runs the module's `main` with arguments, environment, folder, standard streams and exit code of its own, as
`python -m MODULE` does. What it gets wrong is seen from outside alone: its command line and first environment are the
parent's. So a test that signals a command, looks for it among the processes or holds it in a terminal starts a real
one; an environment that changes the interpreter (PYTHON*, LC_*) gets a real one here too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import inspect
import io
import json
import logging
import math
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer.main

ROOT = Path(__file__).resolve().parents[1]
MARK = "PRL_TEST_SESSION"
# Variables of a request come in one message.
MESSAGE_BYTES = 1 << 20
# What a module imports only after it has checked its config.
LATER = {
    "prime_rl.inference.server": (
        "prime_rl.inference.serve",
        "prime_rl.inference.embedded.server",
        "transformers.models.qwen3.modeling_qwen3",
    ),
    "prime_rl.trainer.train": ("prime_rl.trainer.loop", "transformers.models.qwen3.modeling_qwen3"),
    "tests.fork_runner": ("tests.kill_points", "tests.trainer_support", "prime_rl.trainer.loop"),
    "tests.fit_main": ("transformers.models.qwen3.modeling_qwen3",),
    "benchmarks.selfcheck": ("benchmarks.selfcheck_replay", "transformers.models.qwen3.modeling_qwen3"),
}


def _of_the_interpreter(env: Mapping[str, str]) -> dict[str, str]:
    """What Python reads as it starts, but the path."""
    kinds = ("PYTHON", "LC_", "LANG", "LD_", "COVERAGE_")
    return {name: value for name, value in env.items() if name.startswith(kinds) and name != "PYTHONPATH"}


class Warm:
    """The parent of forks of one module, from outside."""

    def __init__(self, module: str, *, is_forked: bool = False) -> None:
        """`is_forked`: it is one of this process, which has loaded what takes long, instead of a new interpreter."""
        self.module = module
        self._interpreter = _of_the_interpreter(os.environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Nothing of the test that needs it first: neither its workspace nor its key.
        env = {name: value for name, value in os.environ.items() if not name.startswith("PRL_") or name == MARK}
        command = [sys.executable, "-m", "tests.warm", module, str(theirs.fileno())]
        with theirs:
            if not is_forked:
                started = subprocess.Popen(
                    command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
                self._wait: Callable[[], object] = started.wait
            elif (pid := os.fork()) == 0:
                _start_anew(module, theirs, env)
            else:
                self._wait = functools.partial(os.waitpid, pid, 0)

    def suits(self, env: Mapping[str, str]) -> bool:
        """Whether a fork with this environment does what a new interpreter would."""
        return _of_the_interpreter(env) == self._interpreter and "COVERAGE_PROCESS_START" not in env

    def run(
        self, args: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout_s: float, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, and to that of all that has its output. Raises TimeoutExpired."""
        command = [sys.executable, "-m", self.module, *args]
        if not self.suits(env):
            return subprocess.run(
                command, env=env, cwd=cwd, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        (asks, question), (out, says), (err, complains) = os.pipe(), os.pipe(), os.pipe()
        started = self.fork(args, env, cwd, [asks, says, complains])
        for fd in (asks, says, complains):
            os.close(fd)
        with contextlib.suppress(BrokenPipeError), open(question, "wb", buffering=0) as file:
            file.write(stdin.encode())
        said = _read([out, err], time.monotonic() + timeout_s)
        if said is None:
            started.kill()
            raise subprocess.TimeoutExpired(command, timeout_s)
        shown, complaint = (each.decode().replace("\r\n", "\n") for each in said)
        return subprocess.CompletedProcess(command, started.wait(timeout_s), shown, complaint)

    def start(self, args: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path) -> Started:
        """Start a command as the supervisor does: a session of its own, its output to a file. `suits` must hold."""
        with log.open("wb") as out, open(os.devnull, "rb") as nothing:
            return self.fork(args, env, cwd, [nothing.fileno(), out.fileno(), out.fileno()], leads=True)

    def begin(self, args: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> Piped:
        """Start a command without input, its output in pipes. `suits` must hold."""
        (out, says), (err, complains) = os.pipe(), os.pipe()
        with open(os.devnull, "rb") as nothing:
            answer = self._ask(args, env, cwd, [nothing.fileno(), says, complains], leads=False)
        for fd in (says, complains):
            os.close(fd)
        return Piped(answer, out, err)

    def fork(
        self, args: Sequence[str], env: Mapping[str, str], cwd: Path, fds: Sequence[int], *, leads: bool = False
    ) -> Started:
        """Start a command with these files as its standard streams. `suits` must hold."""
        return Started(self._ask(args, env, cwd, fds, leads=leads))

    def _ask(self, args: Sequence[str], env: Mapping[str, str], cwd: Path, fds: Sequence[int], *, leads: bool) -> int:
        answer, answers = os.pipe()
        request = {"args": list(args), "env": dict(env), "cwd": str(cwd), "leads": leads}
        socket.send_fds(self._socket, [json.dumps(request).encode()], [*fds, answers])
        os.close(answers)
        return answer

    def close(self) -> None:
        self._socket.close()
        self._wait()


class Started:
    """A fork that lives, as a `Popen` is: `answer` tells its pid, and then its exit code."""

    def __init__(self, answer: int) -> None:
        self._answer = answer
        self._said = b""
        self.returncode: int | None = None
        while b" " not in self._said:
            self._hear()
        self.pid = int(self._said.split()[0])

    def _hear(self) -> None:
        chunk = os.read(self._answer, 64)
        self._said += chunk
        if not chunk:
            os.close(self._answer)
            _, _, code = self._said.decode().partition(" ")
            self.returncode = int(code)

    def poll(self) -> int | None:
        while self.returncode is None and select.select([self._answer], [], [], 0.0)[0]:
            self._hear()
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        deadline = time.monotonic() + timeout_s if timeout_s is not None else math.inf
        while self.returncode is None:
            left_s = None if timeout_s is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._answer], [], [], left_s)[0]:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout_s or 0.0)
            self._hear()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Piped(Started):
    """One whose output can be read while it lives."""

    def __init__(self, answer: int, out: int, err: int) -> None:
        super().__init__(answer)
        self.stdout, self.stderr = os.fdopen(out, encoding="utf-8"), os.fdopen(err, encoding="utf-8")

    def communicate(self, timeout: float) -> tuple[str, str]:
        """The rest of its output, which fits into the pipes, once it has ended."""
        self.wait(timeout)
        with self.stdout, self.stderr:
            return self.stdout.read(), self.stderr.read()


def _read(fds: Sequence[int], deadline: float) -> list[bytes] | None:
    """All that comes until each is closed, which it is here too; None where one is still open at the deadline."""
    said = dict.fromkeys(fds, b"")
    with selectors.DefaultSelector() as waiting:
        for fd in fds:
            waiting.register(fd, selectors.EVENT_READ)
        while waiting.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left_s):
                chunk = os.read(key.fd, 1 << 16)
                said[key.fd] += chunk
                if not chunk:
                    waiting.unregister(key.fd)
        is_late = bool(waiting.get_map())
    for fd in fds:
        os.close(fd)
    return None if is_late else list(said.values())


_parents: dict[str, Warm] = {}


def warm(module: str) -> Warm:
    """The one of this process."""
    if module not in _parents:
        _parents[module] = Warm(module)
    return _parents[module]


def fork_parents() -> None:
    """Before any test has run in this process: fork the parents that would load what it has loaded."""
    for module in LATER if "torch" in sys.modules else ():
        _parents[module] = Warm(module, is_forked=True)


def _start_anew(module: str, requests: socket.socket, env: Mapping[str, str]) -> None:
    """What `python -m tests.warm` does, in a fork of the tests, of which it keeps the modules alone. Never returns."""
    try:
        atexit._clear()
        os.environ.clear()
        os.environ.update(env)
        os.chdir(ROOT)
        path = [str(ROOT), *(each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each)]
        sys.path[:] = [*path, *(each for each in sys.path if each not in ("", *path))]
        sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
        threading.excepthook = threading.__excepthook__
        logging.root.handlers.clear()
        # Who holds the files of the tests open would keep others waiting for their end.
        nothing = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").exists() else ():
            if int(name) not in (1, 2, requests.fileno(), nothing):
                with contextlib.suppress(OSError):  # that of the list itself
                    os.fstat(int(name))
                    os.dup2(nothing, int(name))
        serve(module, requests)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def close_all() -> None:
    while _parents:
        _parents.popitem()[1].close()


def _become(main: Callable[..., int | None], request: dict[str, Any], fds: Sequence[int]) -> None:
    """The command. Never returns."""
    code = 1
    try:
        os.chdir(request["cwd"])
        inherited = 1 + len([each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each])
        os.environ.clear()
        os.environ.update(request["env"])
        path = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        sys.path[:inherited] = [os.getcwd(), *path]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if request["leads"]:
            os.setsid()
        for fd, place in zip(fds, range(3), strict=True):
            os.dup2(fd, place)
            os.close(fd)
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8")
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(io.FileIO(2, "w", closefd=False)), "utf-8", "backslashreplace", line_buffering=True
        )
        vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
        sys.argv[1:] = request["args"]
        code = main(*([request["args"]] if inspect.signature(main).parameters else [])) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


def _keep(main: Callable[..., int | None], request: dict[str, Any], fds: list[int]) -> None:
    """Writes the command's pid, and how it ended. Never returns."""
    answer = fds.pop()
    pid = os.fork()
    if pid == 0:
        os.close(answer)
        _become(main, request, fds)
    for fd in fds:  # or who reads them would wait for this process
        os.close(fd)
    os.write(answer, f"{pid} ".encode())
    os.write(answer, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def serve(module: str, requests: socket.socket) -> None:
    """Fork for each request until no one can make another."""
    loaded = importlib.import_module(module)
    if module == "daemons.cli":  # the tree of all commands, once
        typer.main.get_command = functools.cache(typer.main.get_command)
        typer.main.get_command(loaded.app)
    for each in LATER.get(module, ()):
        importlib.import_module(each)
    sys.argv = [str(loaded.__file__)]
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that of a terminal is for the tests
    while True:
        message, fds, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 4)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            _keep(loaded.main, json.loads(message), fds)
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
    os._exit(0)  # what is frozen, libraries take for a leak and say so
