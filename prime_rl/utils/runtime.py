"""This process: its log, clock and memory, tasks beside its owner, installed extras, its addresses. Without torch.

One log format for every process, on standard error by default: time, level, part, message. A record may quote a run:
its message is one line, and nothing in it is obeyed by a terminal. Decisions within a process go by a clock that never
jumps; what is written for others, and read by people, is `time.time()`. A task that nothing awaits and that ends by an
exception is logged, always. Extras are the parts of the installation that not every machine has (`pyproject.toml` lists
them). Addresses are those by which other machines reach this one, and the ports on which it listens.

`http_refusal` is the rule of every HTTP server of the project. A page in a browser reaches none but the server that it
came from. It can send requests to each address that its reader's machine reaches, and give that address a name of its
own. So the name that is asked for (`Host`) must be one of the server's, a page (`Origin`) must come from that name, and
a POST must be declared as JSON: browsers ask before they send that elsewhere.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import errno
import gc
import ipaddress
import logging
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any, TextIO

import psutil

from prime_rl.utils.text import clean_text

# glibc's name for it in mallopt(3), and the most that it takes: larger blocks are always mappings of their own.
_M_MMAP_THRESHOLD = -3
_MOST_BYTES = 32 << 20


def set_up_memory() -> bool:
    """Choose how the memory of a pass's tensors is kept on a CPU. Call it before the first tensor is made.

    Left alone, glibc decides by what was freed last, and a block that goes back to the system is cleared when it comes
    again: a third of a pass. Here blocks of up to 32 MiB are in one heap and are used again. The tensors go in another
    order than they came, so the heap has holes; a pass that is to take little memory calls `give_back_holes` from time
    to time. What holes take is in `trainer.memory`.

    Returns whether the C library has this setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _MOST_BYTES) == 1


# In the errors of torch that are no OutOfMemoryError: of its allocator on the host, and of cuBLAS.
_NO_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """True when `error` is that memory could not be had, on the host or on a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def give_back_holes() -> None:
    """Give free pages of the heap back to the system: a fraction of a millisecond, and each is cleared when used again.

    Left alone they add up: for an aligned block glibc looks for more than its size, so not in a hole of that size.
    """
    if trim := _trim():
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Import torch and the model code in here.

    They make some 400,000 objects that stay. Python's collector of cycles would look through them again and again while
    they are made (measured: a fifth of the time to load them), and at every full collection after (0.2 s and more, in
    which no token is made). So it rests meanwhile, and what is there at the end is left out of its rounds.
    """
    if not gc.isenabled():  # within another one, or switched off by a person
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
        # Some libraries report at the end what was not collected.
        atexit.register(gc.unfreeze)


# A driver that wakes up many GPUs takes its time.
TIMEOUT_S = 60.0


def nvidia_smi(*options: str, timeout_s: float = TIMEOUT_S) -> str:
    """The output of the driver's own tool; "" without the tool or the driver, or when it takes longer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, *options]
    try:
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=timeout_s, stdin=subprocess.DEVNULL, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def listed_gpus() -> int:
    """GPUs that the driver's own tool lists; 0 without the tool or the driver."""
    return sum(line.startswith("GPU ") for line in nvidia_smi("-L").splitlines())


def count_gpus(environment: Mapping[str, str], listed: Callable[[], int] = listed_gpus) -> int:
    """GPUs that CUDA shows to a process with that environment: `CUDA_VISIBLE_DEVICES` where it is set, else all.

    As for CUDA, the first entry that is not a GPU ends the list.
    """
    number = listed()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not number:
        return number
    count = 0
    for entry in map(str.strip, visible.split(",")):
        if not entry or entry.startswith("-") or (entry.isdecimal() and int(entry) >= number):
            break
        count += 1
    return count


logger = logging.getLogger(__name__)


class Background:
    """The background tasks of one owner."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Run `work` from now on; `what` names it in the log."""
        task = asyncio.get_running_loop().create_task(work, name=what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(log_failure)
        return task

    async def cancel(self) -> None:
        """Cancel all of them and wait until they have ended."""
        await cancel_all(self._tasks)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel `tasks` and wait until they have ended, however they end."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def log_failure(task: asyncio.Task[Any]) -> None:
    """Write down the exception that ended `task`, if one did."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a background task failed: %s", task.get_name(), exc_info=error)


# Modules without which no daemon of a workspace starts.
CPU = ("torch", "transformers", "tokenizers", "httpx", "starlette")


def install_command(extra: str) -> str:
    """The shell command that installs this project with an extra."""
    return f'pip install "prl-multirun[{extra}]"'


class StartError(RuntimeError):
    """A server cannot start, or its engine failed; `exit_code` is 1, or 2 when the config itself is wrong."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def missing(extra: str, *modules: str) -> str | None:
    """The `modules` that are not installed, and the command that installs them; None if all are. Imports nothing."""
    absent = [module for module in modules if find_spec(module) is None]
    return f"not installed: {', '.join(absent)}; {install_command(extra)}" if absent else None


_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")


def parse_duration_s(text: str) -> float:
    """Seconds of "7d", "12h", "30m", "45s" or plain seconds. Raises ValueError."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"invalid duration {text!r}: expected a number and s, m, h, d or w, such as 7d")
    return float(match[1]) * _UNIT_S[match[2] or "s"]


class SteadyClock:
    """Unix seconds that never jump: those at which it was made, and what has passed since.

    When the machine's clock is set, or the machine slept, this one goes on as if nothing had happened. So it is apart
    from what other processes write: compare only changes of their times.
    """

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        """Unix seconds by this clock."""
        return self._offset_s + time.monotonic()


class TokenRate:
    """Tokens per second of wall time over the last `window_s`, or longer where `per_s` was not called for longer."""

    def __init__(self, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._seen = deque([(clock(), 0)])

    def per_s(self, total: int) -> float:
        """Note `total`, the tokens since the start, and return the rate; 0.0 while no time has passed."""
        now_s = self._clock()
        while len(self._seen) > 1 and now_s - self._seen[1][0] >= self._window_s:
            self._seen.popleft()
        since_s, before = self._seen[0]
        self._seen.append((now_s, total))
        return (total - before) / (now_s - since_s) if now_s > since_s else 0.0


REPEAT_S = 60.0
MAX_SEEN = 1000  # messages


class _Utc(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return time.strftime(datefmt or "%FT%T", time.gmtime(record.created))

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", " ")

    def format(self, record: logging.LogRecord) -> str:
        return clean_text(super().format(record))


class _Repeats(logging.Filter):
    """Lets the same warning or error through once in REPEAT_S, with how often it was left out since."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        message = record.getMessage()
        at, num_left_out = self._seen.pop((record.name, message), (-REPEAT_S, 0))
        is_repeated = 0 <= record.created - at < REPEAT_S
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen[record.name, message] = (at, num_left_out + 1) if is_repeated else (record.created, 0)
        if num_left_out and not is_repeated:
            record.msg, record.args = f"{message} ({num_left_out} more times since)", ()
        return not is_repeated


def no_terminal() -> str | None:
    """The standard streams that are not a terminal, in words; None when all three are."""
    streams = {"input": sys.stdin, "output": sys.stdout, "error": sys.stderr}
    other = [name for name, stream in streams.items() if stream is None or not stream.isatty()]
    return f"standard {' and '.join(other)} must be a terminal" if other else None


def complain(part: str, message: object) -> None:
    """Print an error to standard error; `message` may quote a run."""
    print(f"{part}: {clean_text(str(message))}", file=sys.stderr, flush=True)


def setup_logger(part: str, level: str = "info", stream: TextIO | None = None) -> logging.Logger:
    """Configure the root logger once, at the start of an entry file, and return the logger of `part`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(_Repeats())
    handler.setFormatter(_Utc("%(asctime)sZ %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "watchdog", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return logging.getLogger(part)


LOOPBACK = "127.0.0.1"
# Reserved for documents: nothing is there, and nothing is sent. It only makes the kernel choose a way out.
OUTSIDE = ("192.0.2.1", 9)


def interface_of(address: str) -> str | None:
    """The name of the interface that has `address`, or None when none of this machine's has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`: "localhost", or a loopback address. Looks up no name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_address() -> str:
    """The IPv4 address of the interface that leads outside, else of any that is not the loopback, else loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(OUTSIDE)
        return str(probe.getsockname()[0])
    every = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
    outside = [each.address for each in every if each.family == socket.AF_INET and not each.address.startswith("127.")]
    return min(outside, default=LOOPBACK)


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet. Raises OSError when the port is taken or the address is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, though there is but one: asyncio switches Nagle's delay off only where it is, and with that
    # delay an answer on a kept connection can be 40 ms late.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # Without it a restart would fail while old connections are in TIME_WAIT.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def bind(host: str, port: int) -> socket.socket:
    """`bound_socket` of a server. Raises StartError when the port is taken or the address is not ours."""
    try:
        return bound_socket(host, port)
    except OSError as error:
        problem = f"cannot listen on {host} port {port}: {error.strerror or error}"
        if error.errno == errno.EADDRINUSE:
            problem = f"port {port} on {host} is in use: stop the other server or set another `port` (0: a free one)"
        raise StartError(problem) from error


def reachable(host: str) -> str:
    """The address under which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)


def origin(host: str, port: int) -> str:
    """The URL of a server that listens on `host`, for clients on this machine."""
    name = reachable(host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


_AUTHORITY = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{1,5})?")
_SHOWN = 100


def http_refusal(
    method: str, headers: Iterable[tuple[str, str]], hosts: Collection[str] | None = ()
) -> tuple[int, str] | None:
    """Return the HTTP status and one line for a request that must not be answered, else None.

    Args:
        headers: name and value of each, one that is sent twice twice.
        hosts: the server's names beside those of the loopback; None: any, since the server asks for a key.
    """
    found = defaultdict(list)
    for name, value in headers:
        found[name.lower()].append(value.strip().lower())
    host = found["host"][0] if len(found["host"]) == 1 else ""
    parts = _AUTHORITY.fullmatch(host)
    asked = parts and (parts["address"] or parts["name"])
    if hosts is not None and (asked is None or not (is_loopback(asked) or asked in hosts)):
        return 403, f"Host {host[:_SHOWN]!r} is not a name of this server: use 127.0.0.1 or localhost."
    if foreign := [origin for origin in found["origin"] if origin.partition("://")[2] != host]:
        return 403, f"Requests from pages of other sites are refused: Origin is {foreign[0][:_SHOWN]!r}."
    kinds = [value.partition(";")[0].strip() for value in found["content-type"]]
    if method == "POST" and kinds != ["application/json"]:
        return 415, "The body must be JSON, with Content-Type: application/json."
    return None
