"""`[[env]] id = "agent"`: the program that is started for each rollout, its examples, rewards and limits."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shutil
import tarfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import msgspec
from pydantic import Field, field_validator, model_validator

from prime_rl.configs.base import ApiUrl, BaseConfig, ConfigError, ConfigProblem
from prime_rl.configs.jsonl import FUNCTION, MAX_FOLDER_BYTES, Place, RowsArgs, Scorer
from prime_rl.contract.files import closing, is_of_a_run, is_own, open_file
from prime_rl.contract.layout import RunDir

AGENT = "agent"
WAYS = ("file", "posted", "command", "judge")
# Of a task in a folder of tasks, and what is run where no other command is named.
INSTRUCTION, TEST, DOCKERFILE = "instruction.md", ("bash", "tests/test.sh"), "environment/Dockerfile"
# What each rollout sets itself.
OWN_VARIABLES = frozenset(
    (
        *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
        *("PRL_SESSION_URL", "PRL_MODEL", "PRL_EXAMPLE", "PRL_VERIFIER_DIR"),
    )
)
# The environment's own steps around the program and the command after it: a copy of the folder, a judge.
MARGIN_S = 300.0
# Of memory and files, in MiB; and of the processor time of a process, in seconds: limits of the kernel are 64-bit.
MAX_MB = 1 << 40
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class JudgeConfig(BaseConfig):
    """`[env.args.judge]`: a model that scores what a rollout did, by a rubric."""

    model: str | None = Field(None, min_length=1)
    """Name of the model at `base_url`; null: the run's own base model, which the run's inference serves."""

    base_url: ApiUrl | None = None
    """An OpenAI-compatible endpoint, such as "https://api.openai.com/v1"; null with the base model."""

    api_key_var: str | None = None
    """Environment variable with the key of the endpoint, or, with `_FILE`, the name of a file that only its owner can
    read; null sends none. The program does not get it."""

    rubric: str = Field(min_length=1)
    """The words by which a high score is earned."""

    scale: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest score that the judge gives. The reward is its place between them: 0 to 1."""

    mode: Literal["score", "rank"] = "score"
    """"score": each rollout by itself. "rank": all rollouts of an example in one request, against each other;
    in evaluations each by itself."""

    temperature: float | None = Field(None, ge=0, le=2)
    """Temperature of the judge; null: the endpoint's own, and 0 of the base model."""

    max_tokens: int | None = Field(None, ge=1)
    """Longest answer of the judge, in tokens; null: the endpoint's own, and 1024 of the base model."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.model is None) != (self.base_url is None):
            raise ValueError("model, base_url: give both, or neither for the run's own base model as the judge")
        if self.api_key_var and not self.base_url:
            raise ValueError("api_key_var: not used with the base model as the judge: remove it")
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale: found {list(self.scale)}: must be two numbers, the lower one first")
        return self


class AgentArgs(RowsArgs):
    """`[env.args]` of `agent`: a program that talks to the policy as to any model, and the reward of what it did."""

    command: list[str] = Field(min_length=1)
    """The program and its arguments, such as ["python", "agent.py"]; no shell. Relative to the rollout's folder."""

    cwd: str | None = None
    """A folder, relative to the config file, of which each rollout gets a fresh copy to work in; null: an empty one.
    `prl runs add` copies it into the run. At most 64 MiB, and no links that lead out of it."""

    path: str = ""
    """Examples in a file, as `jsonl` has them. Either `path` or `tasks` is required."""

    tasks: str | None = None
    """A folder of tasks, each a folder with instruction.md, and tests/, environment/ or files/ (docs/agents.md)."""

    env: list[str] = Field(default_factory=list)
    """Environment variables that the program gets, by name, in addition to what every process needs."""

    set: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the program, with their values."""

    timeout_s: float = Field(600.0, gt=0, allow_inf_nan=False)
    """Deadline of the program, in seconds; its waiting for the policy counts. Again as many for `reward_command`. A
    shorter one of a task's task.toml goes before."""

    max_turns: int = Field(64, ge=1)
    """Calls of the policy in one rollout, at most; further ones are refused."""

    max_tokens_total: int | None = Field(None, ge=1)
    """Tokens that the policy samples in one rollout, at most; null sets no limit."""

    reward: str | None = None
    """Where the reward comes from: "file" (reward.json in the rollout's folder), "posted", "command", "judge", a scorer
    of `jsonl` for the program's last line, or "file.py:function". Null: "file", with `tasks` "command"."""

    reward_command: list[str] = Field(default_factory=list)
    """For "command": a program that is run in the rollout's folder afterwards; with `tasks` by default bash
    tests/test.sh. The number in its last line is the reward, else exit code 0 is 1, any other 0."""

    allow_failure: bool = False
    """Count a rollout although its program ended with an exit code other than 0."""

    cpu_seconds: int | None = Field(None, ge=1, le=MAX_MB)
    """Processor time of each process, in seconds; null sets no limit."""

    memory_mb: int | None = Field(None, ge=16, le=MAX_MB)
    """Address space of each process, in MiB (of a container: its memory); null sets no limit."""

    max_file_mb: int | None = Field(1024, ge=1, le=MAX_MB)
    """Size of each file that is written, in MiB; null sets no limit."""

    runtime: Literal["process", "podman", "docker"] = "process"
    """Where the program runs: as a process of this account, or in a container of `image`."""

    image: str | None = None
    """Image of the container, whose folder /work is that of the rollout; null: that of each task
    (`environment.docker_image` in its task.toml)."""

    judge: JudgeConfig | None = None
    """The judge, for `reward = "judge"`."""

    @property
    def way(self) -> str:
        """`reward`, or what stands for null."""
        return self.reward or ("command" if self.tasks else "file")

    @property
    def scoring(self) -> Scorer | None:
        """The scorer, when one gives the reward."""
        return next((each for each in get_args(Scorer) if each == self.reward), None)

    @property
    def function_name(self) -> str | None:
        """`reward`, when it names a function."""
        return self.reward if self.reward and FUNCTION.fullmatch(self.reward) else None

    @property
    def is_tested(self) -> bool:
        """True when each task's own tests give the reward."""
        return self.way == "command" and not self.reward_command

    @property
    def files(self) -> dict[str, int]:
        """The files that these arguments name, a folder as one, with the most bytes of each."""
        # What is packed has a header for each file.
        return super().files | {folder: 2 * MAX_FOLDER_BYTES for folder in (self.cwd, self.tasks) if folder}

    @property
    def whole_timeout_s(self) -> float:
        """Deadline of all of a rollout."""
        return self.timeout_s * (2 if self.way == "command" else 1) + MARGIN_S

    def placed(self, place: Place) -> dict[str, Any]:
        """These arguments, with files at `place` of what the config names. Raises ConfigError; see `check_owner`."""
        check_owner(place("orch.toml"))
        folders = {"cwd": self.cwd, "tasks": self.tasks}
        return super().placed(place) | {key: str(place(named)) for key, named in folders.items() if named}

    @field_validator("command", "reward_command")
    @classmethod
    def _can_be_run(cls, words: list[str]) -> list[str]:
        if (words and not words[0]) or any("\0" in word for word in words):
            raise ValueError(f"found {words}: must be a program and its arguments, such as ['python', 'agent.py']")
        return words

    @field_validator("env", "set")
    @classmethod
    def _are_variables(cls, given: Any) -> Any:
        for name in given:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"found {name!r}: must be the name of an environment variable")
            if name in OWN_VARIABLES:
                raise ValueError(f"found {name!r}: each rollout has its own value of it; remove it")
        return given

    @field_validator("reward")
    @classmethod
    def _is_known(cls, reward: str | None) -> str | None:
        known = (*WAYS, *get_args(Scorer))
        if reward is not None and reward not in known and not FUNCTION.fullmatch(reward):
            raise ValueError(
                f"found {reward!r}: must be one of {', '.join(known)}, or a function, such as score.py:score"
            )
        return reward

    @model_validator(mode="after")
    def _fits(self) -> Self:
        way, is_process = self.way, self.runtime == "process"
        wrong = {
            "path: name examples with either path or tasks": bool(self.path) == bool(self.tasks),
            "reward_command: name what is run afterwards": way == "command" and not (self.tasks or self.reward_command),
            f"reward_command: not used with reward = {way!r}": way != "command" and self.reward_command,
            "judge: add a table [env.args.judge] with a rubric": way == "judge" and not self.judge,
            f"judge: not used with reward = {way!r}": way != "judge" and self.judge,
            f"reward: tasks have no right answers for {way!r}; remove it for their tests": self.tasks and self.scoring,
            f"image: runtime = {self.runtime!r} starts a container: name its image, such as 'python:3.11'": (
                not is_process and not self.image and not self.tasks
            ),
            "image: not used with runtime = 'process': remove it, or set runtime = 'podman' or 'docker'": (
                is_process and self.image
            ),
            "set: a value has a character 0 in it": any("\0" in value for value in self.set.values()),
        }
        if found := next((words for words, is_wrong in wrong.items() if is_wrong), None):
            raise ValueError(found)
        return self


def check_owner(file: Path) -> None:
    """Raise ConfigError when `file` is of a run whose config another account owns or may write: its command is code."""
    if not is_of_a_run(file):
        return
    run = RunDir(file.parent.parent)
    for config in (run.orch_toml, run.admitted, run.applied):
        with contextlib.suppress(FileNotFoundError), closing(open_file(config)) as fd:
            if not is_own(fd):
                words = "belongs to another account, or others may write it: its command is not run"
                raise ConfigError(str(config), [ConfigProblem("", f"{words}; add the run as the workspace's account")])


class _Phase(msgspec.Struct):
    timeout_sec: float = math.inf
    network_mode: str = "public"


class _TaskEnvironment(msgspec.Struct):
    docker_image: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    memory: str | None = None  # "2G", as older files have it
    gpus: int = 0
    allow_internet: bool = True  # in older files, for network_mode
    network_mode: str = "public"
    mcp_servers: list[Any] = []


class _TaskFile(msgspec.Struct):
    """task.toml, as far as it counts; all other keys are ignored."""

    agent: _Phase = msgspec.field(default_factory=_Phase)
    verifier: _Phase = msgspec.field(default_factory=_Phase)
    environment: _TaskEnvironment = msgspec.field(default_factory=_TaskEnvironment)
    steps: list[Any] = []


@dataclass(frozen=True)
class Task:
    """One task of a folder of them: its prompt, and what its task.toml sets."""

    instruction: str
    image: str | None = None
    timeout_s: float = math.inf
    verifier_timeout_s: float = math.inf
    cpus: float | None = None
    memory_mb: int | None = None


def read_tasks(packed: bytes, args: AgentArgs) -> dict[str, Task]:
    """The tasks in a packed folder, by name. Raises ValueError with the first that cannot be used, and what to do."""
    found: dict[str, Task] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as tar:
            members = {member.name: member for member in tar}
            for name in sorted(each for each, member in members.items() if "/" not in each and member.isdir()):
                if not name.startswith("."):
                    try:
                        found[name] = _task(name, tar, members, args)
                    except ValueError as error:
                        raise ValueError(f"task {name!r} {error}") from error
    except tarfile.TarError as error:
        raise ValueError(f"tasks cannot be read: {error}") from error
    if not found:
        raise ValueError(f"there are no tasks: each is a folder with {INSTRUCTION}")
    return found


def _task(name: str, tar: tarfile.TarFile, members: Mapping[str, tarfile.TarInfo], args: AgentArgs) -> Task:
    def text(part: str) -> str | None:
        member = members.get(f"{name}/{part}")
        opened = tar.extractfile(member) if member and member.isfile() else None
        return opened.read().decode() if opened else None

    if (instruction := text(INSTRUCTION)) is None:
        raise ValueError(f"has no {INSTRUCTION}")
    if args.is_tested and f"{name}/{TEST[1]}" not in members:
        raise ValueError(f"has no {TEST[1]}: add it, or set reward or reward_command")
    try:
        file = msgspec.convert(tomllib.loads(text("task.toml") or ""), _TaskFile)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"has a task.toml that is not valid: {error}") from error
    asked = file.environment
    networks = {each.network_mode for each in (asked, file.agent, file.verifier)}
    has_dockerfile = f"{name}/environment/Dockerfile" in members
    refused = {
        "asks for GPUs": asked.gpus > 0,
        "asks for MCP servers": asked.mcp_servers,
        "limits the network": not asked.allow_internet or networks != {"public"},
        "has several steps": file.steps,
        "names an image that begins with -": (asked.docker_image or "").startswith("-"),
    }
    if wrong := next((words for words, is_wrong in refused.items() if is_wrong), None):
        raise ValueError(f"{wrong} in its task.toml, which is not possible here: leave the task out")
    if args.runtime == "process" and (asked.docker_image or has_dockerfile):
        raise ValueError(f"needs an image ({asked.docker_image or DOCKERFILE}): set runtime = 'podman' or 'docker'")
    if args.runtime != "process" and not (args.image or asked.docker_image):
        words = f"no image: {DOCKERFILE} is not built" if has_dockerfile else "no image"
        raise ValueError(f"has {words}; set environment.docker_image in its task.toml, or image for all tasks")
    image, times = args.image or asked.docker_image, (file.agent.timeout_sec, file.verifier.timeout_sec)
    memory_mb = asked.memory_mb or _mebibytes(asked.memory)
    sizes = (asked.cpus or 1, memory_mb or 1)
    if not all(value > 0 for value in (*times, *sizes)) or max(sizes) >= MAX_MB:
        raise ValueError("has a number in its task.toml that is not above 0, or too large")
    return Task(instruction, image, *times, asked.cpus, memory_mb)


def _mebibytes(size: str | None) -> int | None:
    """Of a size such as "2G" or "512M". Raises ValueError."""
    if size is None:
        return None
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", size.strip(), re.IGNORECASE)):
        raise ValueError(f"has environment.memory = {size!r} in its task.toml: must be a size such as '2G'")
    return max(1, int(min(float(found[1]) * 1024.0 ** ("KMGT".index(found[2].upper()) - 1), MAX_MB)))


def missing_program(args: AgentArgs, template: bytes) -> tuple[str, str] | None:
    """(argument, what is wrong) for a program that is to be started and is not on this machine; None: all are.

    `template` is the packed `cwd`. What a task or the program itself puts into the folder is not known before.
    """
    named = {"command": args.command, "reward_command": args.reward_command}
    if args.runtime != "process":
        named = {"runtime": [args.runtime]}
    try:
        names = tarfile.open(fileobj=io.BytesIO(template), mode="r:").getnames() if template else []  # noqa: SIM115
    except tarfile.TarError as error:
        return "cwd", f"the packed folder cannot be read: {error}"
    for key, (program, *_) in ((key, words) for key, words in named.items() if words):
        is_here = bool(args.tasks) or key != "command"
        if "/" not in program or os.path.isabs(program):
            is_here = shutil.which(program) is not None
        else:
            is_here |= os.path.normpath(program) in names
        if not is_here:
            where = "in cwd" if "/" in program else "on PATH"
            return key, f"{program!r} was not found {where}: install it, or name it with its path"
    return None
