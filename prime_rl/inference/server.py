"""The inference server: `python -m prime_rl.inference.server @ inference.toml`. Reads top to bottom.

Checks what can be checked before anything heavy is loaded (key, model folder, address and port; each failure is one
line), takes the port, writes "starting" to `inference/<n>/status.json`, and hands over to the chosen engine; only that
engine is imported. Exit codes: 0 stopped, 1 failed, 2 wrong config.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from prime_rl.configs.base import ConfigError, parse_argv
from prime_rl.configs.inference import InferenceConfig
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import InferenceStatus, StatusWriter
from prime_rl.utils.process import StopFlag, die_with_parent
from prime_rl.utils.runtime import StartError, bind, complain, heavy_imports, is_loopback, origin, setup_logger
from prime_rl.utils.secrets import SecretError, close_handed, read_secret

# `owner/name`, as on the Hugging Face hub.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 stopped, 1 failed, 2 wrong config."""
    stop = StopFlag().install()
    try:
        config = parse_argv(InferenceConfig, argv)
        logger = setup_logger("inference", config.log.level)
        api_key = read_api_key(config, dict(os.environ))
        close_handed()
        check_model(config.model.name)
        sock = bind(config.host, config.port)
    except ConfigError as error:
        return _fail(str(error), 2)
    except StartError as error:
        return _fail(str(error), error.exit_code)
    url = base_url(config.host, sock.getsockname()[1])
    logger.info("starting the %s engine for %s at %s", config.engine, config.model.name, url)
    status = _open_status(config, url)
    try:
        # Threads of OpenMP that wait must not spin: beside a trainer on the same cores a step takes up to 50 times as
        # long.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        with heavy_imports():  # they take seconds, so they come after every check
            from prime_rl.inference.serve import ServerContext

            if config.engine == "vllm":
                from prime_rl.inference.vllm.server import run
            else:
                from prime_rl.inference.embedded.server import run
        if not stop():
            run(ServerContext(config, sock, api_key, stop, status))
        OutputDir(config.output_dir).replica_work(config.replica).unlink(missing_ok=True)
    except StartError as error:
        return _fail(str(error), error.exit_code)
    finally:
        sock.close()
        status.close(state="stopped", waiting_on=None, num_running=0, num_waiting=0, tokens_per_s=0.0, adapters=[])
    logger.info("stopped%s", f" by {stop.signal_name}" if stop.signal_name else "")
    return 0


def _open_status(config: InferenceConfig, url: str) -> StatusWriter:
    config.output_dir.mkdir(parents=True, exist_ok=True)
    status = InferenceStatus(
        base_url=url, engine=config.engine, model=config.model.name, waiting_on="the model to be loaded"
    )
    if config.status_file:
        return StatusWriter(config.status_file, status)
    output = OutputDir(config.output_dir)
    output.inference.mkdir(exist_ok=True)
    own = output.replica_status(config.replica)
    return StatusWriter(own, status, copies=[output.inference_status] if config.replica == 0 else [])


def _fail(message: str, exit_code: int) -> int:
    complain("inference", " ".join(message.split()))
    return exit_code


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
            f"model.name: folder {name} not found (from {Path.cwd()}): give the path of a Hugging Face model folder, "
            f"or build a small model with `prl make-base --out {name}`"
        )


def _in_hub_cache(name: str) -> bool:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    return (cache / f"models--{name.replace('/', '--')}").is_dir()


def base_url(host: str, port: int) -> str:
    """The URL under which clients on this machine reach a server that listens on `host`."""
    return f"{origin(host, port)}/v1"


if __name__ == "__mp_main__":
    # A process that vLLM spawned from here: Python imports this file in it first, under this name.
    die_with_parent()
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
