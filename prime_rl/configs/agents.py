"""`[[env]] id = "agent"`: the program that is started for each rollout, its examples, rewards and limits."""

from __future__ import annotations

import contextlib
import io
import re
import tarfile
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from prime_rl.configs.base import BaseConfig, ConfigError, ConfigProblem
from prime_rl.configs.jsonl import FUNCTION, MAX_FOLDER_BYTES, Place, RowsArgs, Scorer
from prime_rl.contract.files import closing, is_of_a_run, is_own, open_file
from prime_rl.contract.layout import RunDir

AGENT = "agent"
WAYS = ("file", "posted", "command", "judge")
# Of a task in a folder of tasks, and what is run where no other command is named.
INSTRUCTION, TEST = "instruction.md", ("bash", "tests/test.sh")
# What each rollout sets itself.
OWN_VARIABLES = frozenset(
    (
        *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
        *("PRL_SESSION_URL", "PRL_MODEL", "PRL_EXAMPLE", "PRL_VERIFIER_DIR"),
    )
)
# The environment's own steps around the program and the command after it: a copy of the folder, a judge.
MARGIN_S = 300.0
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class JudgeConfig(BaseConfig):
    """`[env.args.judge]`: a model that scores what the program printed, by a rubric."""

    model: str = Field(min_length=1)
    """Name of the model at its endpoint."""

    base_url: str | None = None
    """An OpenAI-compatible endpoint, such as "https://api.openai.com/v1". Required: the run's own model cannot
    judge."""

    api_key_var: str | None = None
    """Environment variable with the key of the endpoint; null sends none. The program does not get it."""

    rubric: str = Field(min_length=1)
    """The words by which a high score is earned."""

    scale: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest score that the judge gives. The reward is its place between them: 0 to 1."""

    mode: Literal["score", "rank"] = "score"
    """"score": each rollout by itself. "rank", a group by comparison, does not exist yet."""

    @field_validator("mode")
    @classmethod
    def _exists(cls, mode: str) -> str:
        if mode == "rank":
            raise ValueError("found 'rank': a judge that ranks a group does not exist yet; set mode = 'score'")
        return mode

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.base_url or not self.base_url.startswith(("http://", "https://")):
            raise ValueError(
                f"base_url: found {self.base_url!r}: must be the http address of an OpenAI-compatible endpoint; "
                "the run's own model cannot judge"
            )
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
    """Deadline of the program, in seconds; its waiting for the policy counts. Again as many for `reward_command`."""

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

    cpu_seconds: int | None = Field(None, ge=1)
    """Processor time of each process, in seconds; null sets no limit."""

    memory_mb: int | None = Field(None, ge=16)
    """Address space of each process, in MiB (of a container: its memory); null sets no limit."""

    max_file_mb: int | None = Field(1024, ge=1)
    """Size of each file that is written, in MiB; null sets no limit."""

    runtime: Literal["process", "podman", "docker"] = "process"
    """Where the program runs: as a process of this account, or in a container of `image`."""

    image: str | None = None
    """Image of the container; its folder /work is that of the rollout."""

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
    def variables(self) -> list[str]:
        """The environment variables that are needed, by name."""
        return [*self.env, *([self.judge.api_key_var] if self.judge and self.judge.api_key_var else [])]

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
            "judge: add a table [env.args.judge] with model, base_url and rubric": way == "judge" and not self.judge,
            f"judge: not used with reward = {way!r}": way != "judge" and self.judge,
            f"reward: tasks have no right answers for {way!r}; remove it for their tests": self.tasks and self.scoring,
            f"image: name the image for runtime = {self.runtime!r}": not is_process and not self.image,
            "image: set runtime = 'podman' or 'docker' to use it": is_process and self.image,
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


def read_tasks(packed: bytes, *, tested: bool) -> dict[str, str]:
    """The instruction of each task in a packed folder, by name. Raises ValueError that names what is missing.

    Args:
        tested: each must have tests/test.sh.
    """
    found: dict[str, str] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as tar:
            members = {member.name: member for member in tar}
            for name in sorted(each for each, member in members.items() if "/" not in each and member.isdir()):
                if name.startswith("."):
                    continue
                member = members.get(f"{name}/{INSTRUCTION}")
                opened = tar.extractfile(member) if member and member.isfile() else None
                if opened is None:
                    raise ValueError(f"task {name!r} has no {INSTRUCTION}")
                if tested and f"{name}/{TEST[1]}" not in members:
                    raise ValueError(f"task {name!r} has no {TEST[1]}: add it, or set reward or reward_command")
                found[name] = opened.read().decode()
    except (tarfile.TarError, UnicodeDecodeError) as error:
        raise ValueError(f"tasks cannot be read: {error}") from error
    if not found:
        raise ValueError(f"there are no tasks: each is a folder with {INSTRUCTION}")
    return found
