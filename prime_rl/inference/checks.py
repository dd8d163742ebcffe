"""What is checked before anything heavy is loaded: address, key, port, model folder. Each failure is one line.

And what the entry file then hands to the engine that it starts.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from prime_rl.configs.inference import InferenceConfig
from prime_rl.contract.status import StatusWriter
from prime_rl.utils.network import bound_socket, is_loopback
from prime_rl.utils.secrets import SecretError, read_secret
from prime_rl.utils.signals import StopFlag

# `owner/name`, as on the Hugging Face hub.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ServerContext:
    """`sock` is bound and does not listen yet; `api_key` is None when no key is required."""

    config: InferenceConfig
    sock: socket.socket
    api_key: str | None
    stop: StopFlag
    status: StatusWriter


class StartError(RuntimeError):
    """The server cannot start, or its engine failed; `exit_code` is 1, or 2 when the config itself is wrong."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def read_api_key(config: InferenceConfig, environ: dict[str, str]) -> str | None:
    """The API key, or None. Raises StartError when the server would listen beyond this machine without one."""
    try:
        key = read_secret(config.api_key_var, environ)
    except SecretError as error:
        raise StartError(str(error), exit_code=2) from error
    if key is None and not is_loopback(config.host):
        raise StartError(
            f"host: {config.host} can be reached from other machines and no API key is set: set the environment "
            f"variable {config.api_key_var}, or {config.api_key_var}_FILE for a file with it, or listen on 127.0.0.1",
            exit_code=2,
        )
    return key


def check_model(name: str) -> None:
    """Raises StartError when `name` is neither a model folder nor a name on the hub."""
    folder = Path(name)
    if (folder / "config.json").is_file():
        return
    if folder.exists():
        raise StartError(f"model.name: {name} is not a model folder: it has no config.json")
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    if not _HUB_NAME.fullmatch(name) or (offline and not _in_hub_cache(name)):
        raise StartError(
            f"model.name: folder {name} not found: give the path of a Hugging Face model folder, or build a small "
            f"model with `prl make-base --out {name}`"
        )


def _in_hub_cache(name: str) -> bool:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    return (cache / f"models--{name.replace('/', '--')}").is_dir()


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises StartError when the port is taken or the address is not ours."""
    try:
        return bound_socket(host, port)
    except OSError as error:
        problem = f"cannot listen on {host} port {port}: {error.strerror or error}"
        if error.errno == errno.EADDRINUSE:
            problem = f"port {port} on {host} is in use: stop the other server or set another `port` (0: a free one)"
        raise StartError(problem) from error


def base_url(host: str, port: int) -> str:
    """The URL under which clients on this machine reach a server that listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}/v1" if ":" in reachable else f"http://{reachable}:{port}/v1"
