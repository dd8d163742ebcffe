"""`prl env try`: some rollouts of a config's environments, without a slot or a trainer.

The rollouts are made by the orchestrator's own code (`prime_rl.orchestrator.try_env`), in a process of its own. A model
answers through the workspace's inference server; the base model, where none runs, through one that lives as long.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from daemons.adding import trainer_limits
from daemons.chat import BASE, Chat
from daemons.commands import complete
from daemons.commands.common import JsonOption, OutputDirOption, choose_output_dir, number, print_json, say
from daemons.commands.runs import FileArgument
from daemons.data_files import data_problems, plugin_problems, program_problems
from daemons.errors import ActionError, need_cpu
from daemons.process import log_tail, python_module
from daemons.specs import INFERENCE, module_of, saved_folder
from daemons.start import end_as_interrupted
from prime_rl.configs.base import ConfigError, ConfigProblem
from prime_rl.configs.jsonl import place_of
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.validate import load_run_config
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import InferenceStatus, is_alive, read_status
from prime_rl.utils.text import clean_strings, counted, one_line

ECHO = "echo"
# Where neither the config nor a trainer has one.
DEFAULT_SEQ_LEN = 2048
# Loading a model takes seconds, from a slow disk minutes.
START_TIMEOUT_S = 600.0
_MODULE = "prime_rl.orchestrator.try_env"
HELP = """Try environments.

Example: prl env try run.toml
"""
env_app = typer.Typer(no_args_is_help=True, help=HELP, rich_markup_mode=None)


@env_app.callback()
def _env() -> None:
    """Try environments."""


@env_app.command("try")
def try_env(
    file: FileArgument,
    output_dir: OutputDirOption = None,
    num: Annotated[int, typer.Option("-n", min=1, help="Examples of each environment.")] = 3,
    model: Annotated[
        str,
        typer.Option(
            metavar="echo|base|ID",
            help="What answers. echo: no model, the right answer where it is known, else the question. base: the base "
            "model. ID: a run's newest version, by the running inference server.",
            autocompletion=complete.try_models,
        ),
    ] = ECHO,
    as_json: JsonOption = False,
) -> None:
    """Try the environments of a run's config: examples, prompts, a rollout of each, its reward and time.

    It needs no slot and no trainer, and adds no run. The exit code is 1 when no rollout got a reward.

    Example: prl env try run.toml -n 5 --model base
    """
    found = clean_strings(_tried(OutputDir(choose_output_dir(output_dir)), file, num, model))
    rollouts = [each for env in found["envs"] for each in env["rollouts"]]
    if as_json:
        print_json({"file": str(file), "model": model, **found})
    else:
        if any(each["prompt"] and each["prompt_tokens"] is None and not each["error"] for each in rollouts):
            say("prompts are messages, without tokens: the model's tokenizer is not on this machine")
        for env in found["envs"]:
            say(env_view(env))
    if all(each["error"] for each in rollouts):
        raise typer.Exit(1)


def _tried(output: OutputDir, file: Path, num: int, model: str) -> dict[str, Any]:
    """The answer of the process that tries. Raises ActionError with its reason, or ConfigError."""
    need_cpu()
    config = load_run_config(file)
    place = place_of(file)
    problems = [*data_problems(config, place), *plugin_problems(config)] or program_problems(config, place)
    if problems := problems or list(_of_sessions(config)):
        raise ConfigError(str(file), problems)
    argv, folder = python_module(_MODULE, str(file.absolute()), str(num)), saved_folder(output)
    end_as_interrupted()
    with contextlib.ExitStack() as stack:
        if model != ECHO:
            limits = trainer_limits(output.path)
            seq_len = config.seq_len or (limits.max_seq_len if limits else DEFAULT_SEQ_LEN)
            found = (read_status(path, InferenceStatus) for path in output.inference_statuses().values())
            if model == BASE and not any(is_alive(status, time.time()) for status in found):
                output = stack.enter_context(_own_server(config, seq_len, folder))
            talk = stack.enter_context(Chat(output.path, model))
            argv += [*talk.served, str(seq_len)]
        env = {**os.environ, "PYTHONUTF8": "1"}
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=env, cwd=folder, check=False)
    answer = json.loads(done.stdout) if done.returncode == 0 else {"error": "the process that tries it has crashed"}
    if "error" in answer:
        raise ActionError(answer["error"])
    return dict(answer)


def _of_sessions(config: OrchestratorConfig) -> Iterator[ConfigProblem]:
    """Environments whose rollouts an application makes, for which nothing here would ever ask."""
    what = "its rollouts are made by an application: prl runs add FILE, then prl runs endpoint ID prints its URL"
    for at, env in enumerate(config.env):
        if env.sessions:
            yield ConfigProblem(f"env.{at}.id", f"found {env.id!r}: {what}")


@contextlib.contextmanager
def _own_server(config: OrchestratorConfig, seq_len: int, cwd: Path | None) -> Iterator[OutputDir]:
    """A workspace that has nothing but an inference server with the embedded engine and the base model."""
    with tempfile.TemporaryDirectory(prefix="prl-try-") as folder:
        output = OutputDir(Path(folder))
        log = output.path / "inference.log"
        settings = {"output_dir": folder, "port": "0", "model.name": config.model.name, "model.max_model_len": seq_len}
        flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        with log.open("wb") as file:
            argv = python_module(module_of(INFERENCE), *flags)
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=cwd)

        def is_ready() -> bool:
            if child.poll() is not None:
                why = one_line(" ".join(log_tail(log, 1, this_start_only=False)), 300)
                raise ActionError(f"the base model cannot be served: {why}")
            status = read_status(output.inference_status, InferenceStatus)
            return status is not None and status.state == "serving"

        try:
            wait_for(is_ready, f"{config.model.name} to be loaded", timeout_s=START_TIMEOUT_S)
            yield output
        finally:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=30)
            child.kill()
            child.wait()


def env_view(env: Mapping[str, Any]) -> str:
    """The text that `prl env try` prints for one environment. Text of the environment and the policy is indented."""
    counts = f"{counted(env['num_train'], 'example')} to train on, {env['num_eval']} to evaluate on"
    lines = [f"env {env['env']} ({env['id']}): {counts}, loaded in {env['load_s']:.1f} s"]
    for each in env["rollouts"]:
        reward = "no reward" if each["reward"] is None else f"reward {number(each['reward'])}"
        lines += ["", f"example {one_line(each['example_id'])}  {reward}  {each['time_s']:.2f} s"]
        figures = {**each["rewards"], **each["metrics"]}
        lines += ["  " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items())] if figures else []
        lines += [f"  error: {one_line(each['error'], 2_000)}"] if each["error"] else []
        for title, text in _said(each):
            said = [] if text is None else text.splitlines() or [""]
            lines += [f"  {title}:", *(f"    {line}" for line in said)]
    return "\n".join(lines)


def _said(rollout: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Titles and texts: the prompt and the turns after it, or of a tree all of its branches; then what was printed."""
    branches = rollout["branches"]
    if len(branches) < 2:
        if rollout["prompt_text"] is None:
            yield from ((message["role"], message["content"]) for message in rollout["prompt"])
        else:
            yield f"prompt ({counted(len(rollout['prompt_tokens']), 'token')})", rollout["prompt_text"]
        yield from ((message["role"], message["content"]) for message in rollout["turns"])
    for at, branch in enumerate(branches if len(branches) > 1 else [], 1):
        told = [f"branch {at} of {len(branches)}", _tokens(branch["num_tokens"])]
        if branch["num_shared"]:
            told.append(f"the first {branch['num_shared']} as in branch {branch['shared_with'] + 1}")
        yield ", ".join(filter(None, told)), None
        for turn in branch["turns"]:
            reward = "" if turn["reward"] is None else f"reward {number(turn['reward'])}"
            own = ", ".join(filter(None, [_tokens(turn["num_tokens"]), reward]))
            yield turn["role"] + (f" ({own})" if own else ""), turn["content"]
    if rollout["output"]:
        yield "output of the program", rollout["output"]


def _tokens(num: int | None) -> str:
    return "" if num is None else counted(num, "token")
