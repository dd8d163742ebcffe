"""Errors of acts on a workspace for a person, in one line, and people's lines in the audit log.

Everything that acts for a person uses it; daemons write the audit log by `prime_rl.contract.notes`.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from prime_rl.configs.base import ConfigError
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.layout import LayoutError, OutputDir
from prime_rl.contract.notes import audit
from prime_rl.utils.runtime import CPU, missing


class ActionError(RuntimeError):
    """An action that was refused or failed. The message is made one line: what is wrong, where, what to do."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(in_one_line(message))


class WrongUseError(ActionError):
    """An invalid request, such as a run id with a slash in it."""

    exit_code = 2


@contextlib.contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Turn errors of configs into WrongUseErrors, those of the system into ActionErrors that begin with `what`."""
    try:
        yield
    except (LayoutError, ConfigError) as error:
        raise WrongUseError(str(error)) from error
    except (OSError, UnicodeError) as error:
        words = str(error)
        if isinstance(error, OSError) and error.strerror and error.filename:  # without its number
            words = f"{os.fsdecode(error.filename)}: {error.strerror}"
        raise ActionError(f"{what} failed: {words}") from error


def expand_home(path: Path) -> Path:
    """`path` with the home folder in place of a `~` or `~user` at its start. Raises ActionError without such a user."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ActionError(f"home folder of {path.parts[0]} not found: give the full path") from error


def in_one_line(text: str) -> str:
    """`text` with each stretch of white space, line breaks included, as one blank."""
    return " ".join(text.split())


def printable(text: str) -> str:
    """Typed text whose bytes Python could not decode, decoded as UTF-8 where it is valid UTF-8."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def need_daemons(system: SystemConfig) -> None:
    """Check that the needs of a workspace's daemons are installed. Raises ActionError."""
    need_cpu()
    if system.inference.engine == "vllm":
        need("gpu", "vllm")


def need_cpu() -> None:
    """Check for what trainer, inference, orchestrators and the tools for models need. Raises ActionError."""
    need("cpu", *CPU)


def need(extra: str, *modules: str) -> None:
    """Raises ActionError when a module of the extra is not installed."""
    if sentence := missing(extra, *modules):
        raise ActionError(sentence)


def record_act(
    output: OutputDir,
    action: str,
    run_id: str | None,
    *,
    reason: str = "",
    detail: str = "",
    actor: str | None = None,
) -> None:
    """Append one line. `reason` is the person's own, `detail` is what exactly was done; `actor`: default the person.

    Raises ActionError when the line cannot be written; the action itself is done by then.
    """
    try:
        audit(output, actor or person(), action, run_id, reason=reason, detail=detail)
    except OSError as error:
        raise ActionError(
            f"{action} {run_id or ''} succeeded, but could not be recorded in {output.audit}: {error.strerror}"
        ) from error


def person() -> str:
    """The person who acts, as `user@host`."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
