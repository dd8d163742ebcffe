"""A workspace for the tests of the whole system: a small base model, a system file, and `prl` as a user calls it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from daemons import cli
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.utils.process import StopFlag
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.warm import warm

ROOT = Path(__file__).parent.parent
# Of a greedy answer: `[sampling] max_tokens` of the runs.
NUM_ANSWER_TOKENS = 12
# Enough for a loaded two-core machine; a wait that reaches it is a failure and names what it waited for.
RUN_TOML = """\
batch_size = 16
rollouts_per_example = 4
max_steps = {max_steps}
max_async_level = {max_async_level}
seed = {seed}
[model]
name = "{model}"
[model.lora]
rank = {rank}
[optim]
lr = 0.003
[sampling]
max_tokens = 12
[[env]]
id = "{env}"
args = {{ wording = "short" }}
[ckpt]
interval = 2
"""
PARTS_TOML = """\
[trainer]
num_threads = 1
[trainer.watch]
rescan_s = 1.0
[inference]
port = 0
engine = "{engine}"
num_threads = 1
"""
# Last in the file, so that a test may add to it. A start on a busy machine takes what it takes, and `prl up` waits less
# than the test does.
SUPERVISOR_TOML = f"""\
[supervisor]
start_timeout_s = {0.9 * PATIENCE_S}
"""
SYSTEM_TOML = """\
output_dir = "{output_dir}"
max_concurrent_runs = {slots}
seq_len = 96
[model]
name = "{model}"
[lora]
rank = 8
alpha = 16
"""
WHOLE_SYSTEM_TOML = """\
output_dir = "{output_dir}"
full_finetune = true
seq_len = 96
[model]
name = "{model}"
[broadcast]
type = "{broadcast}"
port = {port}
"""


# It learns in a quarter of the time what the usual shape has learned after 30 steps.
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "batch_size": 16}


def build_base_model(folder: Path, num_steps: int = 100, **shape: int) -> Path:
    """A base model as `prl make-base` makes it, trained for a few steps only; `shape` differs from the usual one.

    In this process, which has loaded torch. What it has learned is measured with two words: nobody reads it.
    """
    import pytest
    import torch

    from prime_rl.base_model import __main__, teach

    is_deterministic = torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(teach, "NUM_WORDS", 2)
        __main__.make(folder, __main__.Recipe(num_steps=num_steps, num_threads=1, **shape), StopFlag())
    torch.use_deterministic_algorithms(is_deterministic)
    return folder


def fetch_smollm2(folder: Path) -> Path:
    """A pretrained model, as `prl make-base` fetches it."""
    command = [sys.executable, "-m", "prime_rl.base_model", "--out", str(folder), "--kind", "smollm2-135m"]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    return folder


def build_number_model(base: Path, folder: Path) -> Path:
    """See tests/number_model.py."""
    command = [sys.executable, "-m", "tests.number_model", str(base), str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    return folder


def build_tool_model(folder: Path) -> Path:
    """See tests/tool_model.py."""
    command = [sys.executable, "-m", "tests.tool_model", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    return folder


@dataclass(frozen=True)
class Workspace:
    """One output_dir with its system file, and `prl` on it. `enter`: what runs a command on the host of `prl`."""

    output_dir: Path
    system_toml: Path
    model: Path
    enter: tuple[str, ...] = ()

    @property
    def paths(self) -> OutputDir:
        return OutputDir(self.output_dir)

    def run_dir(self, run_id: str) -> RunDir:
        return self.paths.run(run_id)

    def prl(
        self, *args: str, check: bool = True, stdin: str | None = None, timeout_s: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PRL_OUTPUT_DIR": str(self.output_dir)}
        if self.enter:
            command = [*self.enter, sys.executable, "-m", "daemons.cli", *args]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                env=environment,
                cwd=ROOT,
                timeout=timeout_s,
                input=stdin,
                check=False,
            )
        else:
            done = warm("daemons.cli").run(args, env=environment, cwd=ROOT, timeout_s=timeout_s, stdin=stdin or "")
        if check and done.returncode:
            raise AssertionError(f"prl {' '.join(args)} exited {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def up(self) -> None:
        self.prl("up", "@", str(self.system_toml))

    def selfcheck(self, *words: str) -> dict[str, Any]:
        """The verdict on each run, none of which differs from the same run alone."""
        command = [sys.executable, "-m", "benchmarks.selfcheck", str(self.output_dir), "--json", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return {each["run_id"]: each for each in json.loads(done.stdout)["runs"]}

    def json(self, *args: str) -> dict[str, Any]:
        """What a command has to say.

        What waits ask again and again is called in this process: every start of Python takes a second of the CPU that
        the system under test needs. Others may become another program (`prl fit` does), so they get their own.
        """
        if self.enter or args[0] not in ("runs", "status"):
            shown = self.prl(*args, "--json").stdout
        else:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                code = cli.run([*args, "--json", "--output-dir", str(self.output_dir)])
            shown = out.getvalue()
            assert code == 0, f"prl {' '.join(args)} exited {code}"
        parsed: dict[str, Any] = json.loads(shown)
        return parsed

    def runs(self) -> dict[str, dict[str, Any]]:
        return {run["run_id"]: run for run in self.json("runs", "list")["runs"]}

    def state(self, run_id: str) -> str:
        return str(self.runs()[run_id]["state"])

    def write_run(self, name: str, **values: Any) -> Path:
        """A run's TOML file beside the workspace, to be added with `prl runs add`."""
        defaults = {
            "max_steps": 6,
            "max_async_level": 1,
            "seed": 1,
            "rank": 8,
            "env": "reverse-text",
            "model": self.model,
        }
        path = self.output_dir.parent / f"{name}.toml"
        path.write_text(RUN_TOML.format(**{**defaults, **values}))
        return path

    def answer(self, version: str, question: str) -> str:
        """The greedy answer of the running inference, through `prl chat`."""
        options = (f"--max-tokens={NUM_ANSWER_TOKENS}", "--temperature=0")
        return self.prl("chat", version, *options, stdin=f"{question}\n").stdout.removesuffix("\n")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        def tell() -> bool:
            return condition()

        try:
            wait_for(tell, what, timeout_s=PATIENCE_S, poll_s=0.3)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from error

    def logs(self, num_lines: int = 25) -> str:
        """The last lines of every log, for the message of a failed test."""
        paths = [*self.output_dir.glob("logs/*.log"), *self.output_dir.glob("run_*/logs/*.log")]
        return "\n".join(f"--- {p}\n" + "\n".join(p.read_text().splitlines()[-num_lines:]) for p in paths)

    def processes(self) -> list[psutil.Process]:
        """Every process with this workspace in its command line or environment (its `info` has both), but the tests."""
        mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
        found = []
        for process in psutil.process_iter(["cmdline", "environ"]):
            words = [*(process.info["cmdline"] or []), (process.info["environ"] or {}).get("PRL_OUTPUT_DIR", "")]
            if str(self.output_dir) in " ".join(words) and process.pid not in mine:
                found.append(process)
        return found


def closed(workspace: Workspace) -> Iterator[Workspace]:
    """The workspace once; whatever was left running in it is ended afterwards."""
    yield workspace
    workspace.prl("down", check=False)
    left = workspace.processes()
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=PATIENCE_S)


def make_workspace(tmp_path: Path, model: Path, *, slots: int = 2, engine: str = "embedded") -> Workspace:
    output_dir = tmp_path / "workspace"
    output_dir.mkdir()
    system_toml = tmp_path / "system.toml"
    values = {"output_dir": output_dir, "model": model, "slots": slots, "engine": engine}
    system_toml.write_text((SYSTEM_TOML + PARTS_TOML + SUPERVISOR_TOML).format(**values))
    return Workspace(output_dir, system_toml, model)


def make_whole_workspace(tmp_path: Path, model: Path, *, engine: str, broadcast: str) -> Workspace:
    """A workspace without adapters."""
    output_dir = tmp_path / "workspace"
    output_dir.mkdir()
    system_toml = tmp_path / "system.toml"
    values = {"output_dir": output_dir, "model": model, "engine": engine, "broadcast": broadcast, "port": free_port()}
    system_toml.write_text((WHOLE_SYSTEM_TOML + PARTS_TOML + SUPERVISOR_TOML).format(**values))
    return Workspace(output_dir, system_toml, model)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def greedy_answer(model: Any, tokenizer: Path, question: str) -> str:
    """What a model of `transformers` answers, as a chat with the running inference at temperature 0 does."""
    from transformers import AutoTokenizer  # with torch, which most of the tests here do without

    words = AutoTokenizer.from_pretrained(tokenizer)
    turn = {"role": "user", "content": question}
    prompt = words.apply_chat_template([turn], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=NUM_ANSWER_TOKENS, do_sample=False)
    return str(words.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
