"""Config of the environments of a run.

What can be checked of `reasoning-gym:FAMILY` without the library, whose import takes seconds, is here too: the lists
are those of its version `VERSION`; a test compares them with the installed library.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from prime_rl.configs.agents import AGENT, AgentArgs
from prime_rl.configs.base import BaseConfig, build
from prime_rl.configs.distill import Teacher
from prime_rl.configs.jsonl import JSONL, JsonlArgs, RowsArgs
from prime_rl.contract.types import MAX_BRANCHES

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
# Environments that need nothing but this project, and the form of all others: provider and name.
BUILT_IN_ENVS = ("reverse-text", "sort-letters", "upper-case", "arithmetic", "guess-number")
PLUGGED_ENV = re.compile(r"(?:verifiers|reasoning-gym|plugin):[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Installed packages name their environments under this group: NAME = "module:factory", called with (args, seed).
PLUGIN, PLUGIN_GROUP = "plugin", "prime_rl.environments"
# What must be installed for a provider; the extra "environments" has both.
MODULES = {"verifiers": ["verifiers"], "reasoning-gym": ["reasoning_gym"]}
# Providers whose rollouts ask the policy through the gateway.
GATEWAY_PROVIDERS = (AGENT, "sessions", "verifiers")
# In a template: where the environment's own question goes.
QUESTION = "{prompt}"


class ShotConfig(BaseConfig):
    """A question with its answer, shown before every question."""

    prompt: str
    """The question, as the environment would ask it."""

    answer: str
    """The answer of the assistant."""


class PromptConfig(BaseConfig):
    """The prompt for the policy: the environment's own question, with a system prompt, a template and examples."""

    system: str | None = None
    """System prompt, in place of the environment's own; null leaves that."""

    template: str = QUESTION
    """First message of a conversation; `{prompt}` stands for what the environment asks."""

    examples: list[ShotConfig] = Field([], max_length=64)
    """Questions and answers before it, each `{ prompt = "...", answer = "..." }`. The template applies to them too."""

    @field_validator("template")
    @classmethod
    def _has_the_question(cls, template: str) -> str:
        if QUESTION not in template:
            raise ValueError(f"found {template!r}: must contain {QUESTION}, which stands for the question")
        return template

    def shown(self, messages: Sequence[Any]) -> list[Any]:
        """A conversation of chat messages as the policy sees it. Of a longer one the beginning is the same."""
        has_system = bool(messages) and messages[0]["role"] == "system"
        system, rest = list(messages[:has_system]), list(messages[has_system:])
        if self.system is not None:
            system = [{"role": "system", "content": self.system}]
        if rest and rest[0]["role"] == "user":
            rest[0] = self._asked(rest[0]["content"])
        shots = ([self._asked(each.prompt), {"role": "assistant", "content": each.answer}] for each in self.examples)
        return [*system, *itertools.chain.from_iterable(shots), *rest]

    def _asked(self, question: str) -> dict[str, str]:
        return {"role": "user", "content": self.template.replace(QUESTION, question)}


# Rollouts that programs outside make.
SESSIONS = "sessions"


class SessionLimits(NamedTuple):
    """The most that one rollout may ask of the policy through the gateway; None: no limit."""

    max_turns: int | None = None
    max_tokens_total: int | None = None


class SessionsArgs(BaseConfig):
    """`[env.args]` of `sessions`."""

    expire_s: float = Field(3600.0, gt=0, allow_inf_nan=False)
    """A session in which nothing is asked and nothing posted for so many seconds ends, and counts for nothing."""

    max_turns: int | None = Field(None, ge=1)
    """Answers of the policy in one session, at most; null: no limit."""

    max_tokens_total: int | None = Field(None, ge=1)
    """Tokens that the policy may write in one session; null: no limit."""


class EnvConfig(BaseConfig):
    """One environment of the run; several are sampled by their weights."""

    id: str
    """The environment: a built-in one, "jsonl" (docs/data.md), "agent" or "sessions" (docs/agents.md),
    "verifiers:TASKSET", "reasoning-gym:FAMILY", or "plugin:NAME" (docs/environments.md)."""

    name: Name | None = None
    """Name in metrics; null takes the last part of the id."""

    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Share of the examples that come from this environment, beside the weights of the others. Has no effect in
    evaluations."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""

    prompt: PromptConfig = PromptConfig()
    """How the policy is asked."""

    env_vars: list[str] = Field(default_factory=list)
    """Environment variables that the process of the environment gets, by name, in addition to what every process needs
    (PATH, HOME and the like, docs/environments.md). The API key of inference is never among them."""

    timeout_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    """Deadline, in seconds, of each step of the environment between two answers of the policy. Waiting for the policy
    does not count. A rollout that misses it is dropped. For "agent" the default is that of its arguments, and some
    minutes."""

    reward_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest reward of the environment. A rollout with a reward outside of it is dropped."""

    teacher: Teacher | None = None
    """The teacher of this environment, with `kind = "distill"`; null: that of the run."""

    @property
    def curriculum(self) -> CurriculumConfig | None:
        """The levels of a family of reasoning-gym, where the run asks for them."""
        provider, _, family = self.id.partition(":")
        return read_args(family, self.args).curriculum if provider == PROVIDER else None

    @property
    def agent(self) -> AgentArgs | None:
        """The arguments of a program that is started for each rollout."""
        return build(AgentArgs, self.args, "args") if self.id == AGENT else None

    @property
    def sessions(self) -> SessionsArgs | None:
        """The arguments of rollouts that programs outside make."""
        return build(SessionsArgs, self.args, "args") if self.id == SESSIONS else None

    @property
    def rows(self) -> RowsArgs | None:
        """The arguments of an environment whose examples are rows of a file, or that has other files of its own."""
        return build(JsonlArgs, self.args, "args") if self.id == JSONL else self.agent

    @property
    def variables(self) -> list[str]:
        """The environment variables that its process gets, by name, in addition to what every process needs."""
        return [*self.env_vars, *(self.agent.env if self.agent else [])]

    def placed(self, place: Callable[[str], Path]) -> EnvConfig:
        """The same, with its files at `place` of what it names."""
        return self.model_copy(update={"args": self.rows.placed(place)}) if self.rows else self

    @property
    def needs_gateway(self) -> bool:
        """True when its rollouts ask the policy through the gateway."""
        return self.id.partition(":")[0] in GATEWAY_PROVIDERS

    @property
    def session_limits(self) -> SessionLimits:
        """Those of each rollout's session, from its arguments."""
        if agent := self.agent:
            return SessionLimits(agent.max_turns, agent.max_tokens_total)
        given = (self.args.get(name) for name in SessionLimits._fields)
        return SessionLimits(*(value if isinstance(value, int) else None for value in given))

    @property
    def max_branches(self) -> int:
        """Samples that a rollout may become: several where others' code may begin a conversation anew."""
        return MAX_BRANCHES if self.id.partition(":")[0] in ("verifiers", PLUGIN, AGENT, SESSIONS) else 1

    @property
    def label(self) -> str:
        """The environment's name in metrics."""
        return self.name or self.id.rpartition(":")[2]

    @field_validator("id")
    @classmethod
    def _is_known(cls, env_id: str) -> str:
        if env_id in (*BUILT_IN_ENVS, JSONL, AGENT, SESSIONS) or PLUGGED_ENV.fullmatch(env_id):
            if env_id.startswith(f"{PROVIDER}:"):
                check_family(env_id.partition(":")[2])
            return env_id
        near = difflib.get_close_matches(env_id, (*BUILT_IN_ENVS, JSONL, AGENT, SESSIONS), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"found {env_id!r}; {hint}expected one of {', '.join(BUILT_IN_ENVS)}, jsonl, agent, sessions, "
            "verifiers:TASKSET, reasoning-gym:FAMILY, plugin:NAME"
        )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _ = self.curriculum, self.rows, self.sessions  # checks the args
        if self.sessions and self.prompt != PromptConfig():
            raise ValueError("prompt: a client of a session asks the policy itself: remove it")
        if agent := self.agent:
            if self.prompt != PromptConfig():
                raise ValueError("prompt: an agent asks the policy itself: remove it")
            if agent.judge and not (self.reward_range[0] <= 0 and self.reward_range[1] >= 1):
                raise ValueError("reward_range: a judge's rewards are from 0 to 1: remove it")
            if "timeout_s" not in self.model_fields_set:
                self.__dict__["timeout_s"] = agent.whole_timeout_s
        low, high = self.reward_range
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"reward_range: found [{low}, {high}]: must be two numbers, the lower one first")
        return self


PROVIDER = "reasoning-gym"
VERSION = "0.1.25"
_NAMES = """
ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation binary_matrix
bitwise_arithmetic boxnet caesar_cipher calendar_arithmetic chain_sum circuit_logic codeio coin_flip
color_cube_rotation complex_arithmetic composite count_bits count_primes countdown course_schedule cryptarithm
decimal_arithmetic decimal_chain_sum dice emoji_mystery family_relationships figlet_font fraction_simplification
futoshiki game_of_life game_of_life_halting gcd graph_color group_anagrams gsm_symbolic intermediate_integration
isomorphic_strings jugs kakurasu knight_swap knights_knaves largest_island lcm leg_counting letter_counting
letter_jumble list_functions mahjong_puzzle manipulate_matrix maze mini_sudoku modulo_grid n_queens needle_haystack
number_filtering number_format number_sequence number_sorting palindrome_generation palindrome_partitioning path_star
polynomial_equations polynomial_multiplication pool_matrix power_function prime_factorization products
propositional_logic puzzle24 quantum_lock ransom_note rearc rectangle_count rotate_matrix rotten_oranges rubiks_cube
rush_hour self_reference sentence_reordering shortest_path simple_equations simple_geometry simple_integration sokoban
spell_backward spiral_matrix string_insertion string_manipulation string_splitting string_synthesis sudoku survo
syllogism time_intervals tower_of_hanoi tsumego word_ladder word_sequence_reversal word_sorting zebra_puzzles
"""
FAMILIES = frozenset(_NAMES.split())
# Families that give their own right answer no reward: nothing true can be learned from them.
BROKEN = frozenset({"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"})
# Families without levels of their own.
WITHOUT_CURRICULUM = frozenset({"acre", "composite", "gsm_symbolic", "list_functions"})
INSTRUCTION = "Think first if you like. Write the final answer between <answer> and </answer>."


class CurriculumConfig(BaseConfig):
    """`[env.args] curriculum`: examples get harder while they are solved. It begins at level 0, the easiest."""

    max_level: int = Field(3, ge=1, le=50)
    """The highest level, or the family's own highest if that is lower. There are `num_examples` of each."""

    raise_at: float = Field(0.8, gt=0, le=1)
    """One level up when at least this share of the rollouts in the window has the full reward."""

    lower_at: float = Field(0.2, ge=0, lt=1)
    """One level down when less than this share has."""

    window: int = Field(32, ge=1, le=1000)
    """How many groups, all of the present level, the share is taken over."""

    @model_validator(mode="after")
    def _is_a_gap(self) -> Self:
        if self.lower_at >= self.raise_at:
            raise ValueError(f"lower_at: found {self.lower_at}: must be less than raise_at = {self.raise_at}")
        return self


class ReasoningGymArgs(BaseConfig):
    """`[env.args]` of `reasoning-gym:FAMILY`."""

    settings: dict[str, Any] = Field(default_factory=dict)
    """The family's own settings, for example `{ min_terms = 2, max_terms = 3 }`."""

    num_examples: int = Field(1000, ge=1, le=100_000)
    """Examples to train on."""

    num_eval_examples: int = Field(100, ge=0, le=100_000)
    """Examples to evaluate on."""

    instruction: str = INSTRUCTION
    """System prompt: which form of answer counts. If the policy writes `<answer>`, the last one is scored, else all
    that it wrote."""

    curriculum: CurriculumConfig | None = None
    """Examples of the family's own levels, from the easiest on, and when the level changes. `settings` hold at every
    level. Evaluations keep their examples."""


def check_family(family: str) -> None:
    """Raises ValueError for a family that the library does not have, or that cannot be learned from."""
    if family in BROKEN:
        raise ValueError(f"{family} gives its own right answer no reward: choose another family")
    if family not in FAMILIES:
        near = difflib.get_close_matches(family, FAMILIES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"reasoning-gym {VERSION} has no family {family!r}{hint}")


def read_args(family: str, args: Mapping[str, Any]) -> ReasoningGymArgs:
    """`[env.args]`, checked but for the family's own settings. Raises ValueError."""
    config = build(ReasoningGymArgs, args, "args")
    if config.curriculum and family in WITHOUT_CURRICULUM:
        raise ValueError(f"args.curriculum: {family} has no levels in reasoning-gym {VERSION}: remove it")
    return config
