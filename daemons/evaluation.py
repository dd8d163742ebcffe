"""Evaluating versions of runs, adapters and the base model through the running inference: `prl eval`.

The adapters are copied into the evaluation's folder first, so a run that goes on may remove its version meanwhile.
`prime_rl.orchestrator.eval_job` does the work, in a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from daemons.adding import copy_start, find_start
from daemons.chat import BASE, living_inference
from daemons.details import parse_version
from daemons.errors import ActionError, WrongUseError, need_cpu, one_line_errors
from daemons.process import python_module
from daemons.trash import existing_run
from prime_rl.configs.admitted import read_effect
from prime_rl.configs.base import build, load_toml, merge
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.evaluation import JOB_FILE, SAMPLES_FILE, EvalJob, EvalProgress, EvalResult
from prime_rl.contract.files import locked, make_folder, write_atomic
from prime_rl.contract.layout import OutputDir

MODULE = "prime_rl.orchestrator.eval_job"
NUM_EXAMPLES = 100
# None are trained on.
ALL_ROWS = 2**31 - 1
# Keys of a run's config that say how it is asked; what it trains with has no effect here.
_KEPT = ("seed", "seq_len", "sampling", "client", "max_env_failure_share")


@dataclass(frozen=True)
class Evaluated:
    """The figures of all targets. `samples` has every rollout; `interrupted`: they are of what was done until then."""

    results: tuple[EvalResult, ...]
    samples: Path
    interrupted: bool


@dataclass(frozen=True)
class Source:
    """The config whose environments are asked, and its file: what the environments name is beside that."""

    config: Mapping[str, Any]
    file: Path


def load_source(
    output_dir: Path, targets: Sequence[str], env: str | None, data: Path | None, scorer: str | None = None
) -> Source:
    """The config of a TOML file, of a run, or of the first run evaluated; with `data` its rows are asked instead.

    Raises ActionError, ConfigError.
    """
    if env is not None and data is not None:
        raise WrongUseError("--env and --data: only one of them")
    runs = [parsed[0] for each in ([env] if env else targets) if (parsed := parse_version(each))]
    if env is not None and not runs:
        file = Path(env).absolute()
        source = Source(load_toml(Path(env)), file)
    elif runs:
        with one_line_errors(f"reading {runs[0]}"):
            run = existing_run(OutputDir(output_dir), runs[0])
            source = Source(read_effect(run).data, run.orch_toml.absolute())
    elif data is not None:
        source = Source({}, data.absolute())
    else:
        raise WrongUseError("no environment: name a TOML file with an [[env]] or a run with --env, or rows with --data")
    if data is None:
        return source
    if not data.is_file():
        raise ActionError(f"--data: {data} not found")
    args = {"path": str(data.resolve()), "num_eval_examples": ALL_ROWS, **({"scorer": scorer} if scorer else {})}
    return Source(
        merge(source.config, {"env": [{"id": "jsonl", "args": args}], "eval": {"env": None}}), data.absolute()
    )


def eval_config(source: Mapping[str, Any], model: str, num_examples: int | None, k: int | None) -> dict[str, Any]:
    """The config of an evaluation out of a run's, or of one with an `[[env]]` alone. Raises ConfigError."""
    own: dict[str, Any] = dict(source.get("eval") or {})
    envs = own.pop("env", None) or source.get("env", [])
    own["num_examples"] = num_examples or own.get("num_examples", NUM_EXAMPLES)
    own["rollouts_per_example"] = k or own.get("rollouts_per_example", 1)
    config = {
        **{key: source[key] for key in _KEPT if key in source},
        **{"batch_size": 1, "rollouts_per_example": 1, "model": {"name": model}, "env": envs, "eval": own},
    }
    build(OrchestratorConfig, config, "the evaluation's config")
    return config


def evaluate(
    output_dir: Path,
    targets: Sequence[str],
    source: Source,
    *,
    num_examples: int | None = None,
    k: int | None = None,
    changes: Mapping[str, Any] | None = None,
    on_progress: Callable[[EvalProgress], None] = lambda progress: None,
) -> Evaluated:
    """Evaluate `targets`, each a run (its newest version), RUN@vN, "base", or an adapter's folder.

    All on the same examples with the same seeds. Raises ActionError, and ConfigError for a `source` that is invalid.
    """
    need_cpu()
    output = OutputDir(Path(output_dir))
    with one_line_errors("evaluating"):
        given = merge(source.config, changes or {})
        elsewhere = (given.get("client") or {}).get("base_url")
        model = (given.get("model") or {}).get("name", "") if elsewhere else living_inference(output)[0].model
        config = eval_config(given, model, num_examples, k)
        make_folder(output.evaluations)
        _remove_leftovers(output)
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
        folder = output.evaluations / name
        folder.mkdir()
        try:
            with locked(folder):
                found = dict(_target(output, each, folder / str(number)) for number, each in enumerate(targets))
                write_atomic(folder / JOB_FILE, msgspec.json.encode(EvalJob(found, config, str(source.file))))
                results, interrupted = _run(folder, on_progress)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            for copy in folder.glob("[0-9]*"):
                shutil.rmtree(copy, ignore_errors=True)
    return Evaluated(tuple(results), folder / SAMPLES_FILE, interrupted)


def _remove_leftovers(output: OutputDir) -> None:
    """Remove the adapters that a killed evaluation copied; one at work holds the lock of its folder."""
    for copy in output.evaluations.glob("*/[0-9]*"):
        with contextlib.suppress(OSError), locked(copy.parent):
            shutil.rmtree(copy)


def _target(output: OutputDir, text: str, folder: Path) -> tuple[str, str | None]:
    """The name of what `text` names, and its adapter, copied to `folder`."""
    parsed = parse_version(text)
    untouched = parsed and parsed[1] == 0 and not os.path.lexists(existing_run(output, parsed[0]).broadcast_dir(0))
    if text == BASE or untouched:
        return text, None
    start = find_start(output, text)
    assert start is not None  # downloads are allowed
    copy_start(start, folder)
    return start.version.name if start.version else text, str(folder.relative_to(output.evaluations))


def _run(folder: Path, on_progress: Callable[[EvalProgress], None]) -> tuple[list[EvalResult], bool]:
    """The results of the process that evaluates. Ctrl-C ends it early, a second one at once. Raises ActionError."""
    results: list[EvalResult] = []
    interrupted = False
    # It inherits the block, and ends it when it can be stopped.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        with subprocess.Popen([*python_module(MODULE), str(folder)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                while True:
                    try:
                        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
                        for line in process.stdout:
                            with contextlib.suppress(msgspec.MsgspecError):  # an environment may print too
                                event = msgspec.json.decode(line, type=EvalProgress | EvalResult)
                                results.append(event) if isinstance(event, EvalResult) else on_progress(event)
                        break
                    except KeyboardInterrupt:
                        if interrupted:
                            raise
                        interrupted = True
                        process.send_signal(signal.SIGINT)
                code = process.wait()
            finally:
                process.kill()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if not results and not interrupted:
        raise ActionError(f"the evaluation failed with exit code {code}; its error is above")
    return results, interrupted
