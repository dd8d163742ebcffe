"""The inference server: `python -m prime_rl.inference.server @ inference.toml`. Reads top to bottom.

Checks what can be checked, takes the port, writes "starting" to `inference/<n>/status.json`, and hands over to the
chosen engine; only that engine is imported. Exit codes: 0 stopped, 1 failed, 2 wrong config.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from prime_rl.configs.base import ConfigError, parse_argv
from prime_rl.configs.inference import InferenceConfig
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import InferenceStatus, StatusWriter
from prime_rl.inference.checks import ServerContext, StartError, base_url, bind, check_model, read_api_key
from prime_rl.inference.child_processes import die_with_parent
from prime_rl.utils.logger import complain, setup_logger
from prime_rl.utils.runtime import heavy_imports
from prime_rl.utils.secrets import close_handed
from prime_rl.utils.signals import StopFlag


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
        _run_engine(ServerContext(config, sock, api_key, stop, status))
        OutputDir(config.output_dir).replica_work(config.replica).unlink(missing_ok=True)
    except StartError as error:
        return _fail(str(error), error.exit_code)
    finally:
        sock.close()
        status.close(state="stopped", waiting_on=None, num_running=0, num_waiting=0, tokens_per_s=0.0, adapters=[])
    logger.info("stopped%s", f" by {stop.signal_name}" if stop.signal_name else "")
    return 0


def _run_engine(context: ServerContext) -> None:
    """Serve until the stop flag is set. The imports take seconds, so they come after every check."""
    # Threads of OpenMP that wait must not spin: beside a trainer on the same cores a step takes up to 50 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with heavy_imports():
        if context.config.engine == "vllm":
            from prime_rl.inference.vllm.server import run
        else:
            from prime_rl.inference.embedded.server import run
    if not context.stop():
        run(context)


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


if __name__ == "__mp_main__":
    # A process that vLLM spawned from here: Python imports this file in it first, under this name.
    die_with_parent()
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
