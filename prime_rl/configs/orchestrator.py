"""Config of one run: what stands in its `control/orch.toml`. Read by its orchestrator and by the trainer.

Only `[[env]]`, `batch_size`, `rollouts_per_example` and `model.name` have no default. What the trainer decides (rank,
alpha, seq_len) is taken from it when it is left out: `validate.resolve`. TOML has no null: "null" in a help text below
means that the key is left out.
"""

from __future__ import annotations

import difflib
import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from prime_rl.configs.base import BaseConfig
from prime_rl.configs.losses import AipoLossConfig, DrGrpoLossConfig, LossConfig
from prime_rl.configs.monitors import MonitorConfig, SamplesConfig
from prime_rl.configs.shared import LogConfig, WatchConfig

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
ServerUrl = Annotated[str, Field(pattern=r"^https?://[^/\s]+(/\S*)?$")]
# Environments that need nothing but this project, and the form of all others: who provides it, and its name there.
BUILT_IN_ENVS = ("reverse-text", "sort-letters", "upper-case", "arithmetic", "guess-number")
PLUGGED_ENV = re.compile(r"(?:verifiers|plugin):[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
Beta = Annotated[float, Field(ge=0, lt=1)]
AdvantageType = Literal["mean", "grpo", "rloo", "dr_grpo", "maxrl"]


class RunLoRAConfig(BaseConfig):
    """The run's adapter."""

    rank: int | None = Field(None, ge=1, le=512)
    """LoRA rank; at most the trainer's; null takes the trainer's."""

    alpha: float | None = Field(None, gt=0)
    """LoRA alpha; null takes the trainer's."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the run's weights and of the adapter that is published. bfloat16: rounded after every update; gradients
    and the optimizer's moments stay in float32."""


class RunModelConfig(BaseConfig):
    """Which model the run trains."""

    name: str
    """The base model; must be the trainer's."""

    lora: RunLoRAConfig = RunLoRAConfig()
    """The run's adapter. A trainer that fine-tunes the whole model refuses this table."""

    full_finetune: bool | None = None
    """Whether the run trains the whole model; null takes what the trainer does, any other value must be that."""

    @property
    def trains_whole_model(self) -> bool | None:
        """What this config says of it; None when that is left to the trainer."""
        return False if self.full_finetune is None and "lora" in self.model_fields_set else self.full_finetune

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.full_finetune and "lora" in self.model_fields_set:
            raise ValueError("full_finetune: the whole model has no adapter: leave out [model.lora]")
        return self


class OptimConfig(BaseConfig):
    """The run's optimizer."""

    type: Literal["adamw", "adam", "nadam", "radam", "adamax", "rmsprop", "adagrad", "sgd", "muon"] = "adamw"
    """Which optimizer: torch's own, or Muon in float32. adam is adamw: the decay is decoupled in all of them."""

    lr: float = Field(1e-4, gt=0, allow_inf_nan=False)
    """Peak learning rate."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running mean and of the running square (adamax: of the running maximum). sgd and muon: the first is
    the momentum. rmsprop: the second is its alpha, and there is no momentum. adagrad sums, and uses neither."""

    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Decoupled weight decay: before each update the weights shrink by lr x weight_decay, whatever the type."""

    max_norm: float = Field(1.0, ge=0)
    """The run's gradient is scaled down to this norm; 0: never."""


class SchedulerConfig(BaseConfig):
    """The run's learning rate over its steps."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up: constant, or down to `min_lr_ratio` at `max_steps`."""

    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from zero."""

    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Last learning rate over the peak."""


class AdvantageConfig(BaseConfig):
    """Advantages from the rewards of one group (all rollouts of one example)."""

    type: AdvantageType = "grpo"
    """mean and dr_grpo: A = R - mean. grpo: (R - mean) / (std + 1e-6). rloo: R - mean of the others. maxrl: (R - mean)
    / mean. See `docs/advantages.md`."""

    length_penalty: float = Field(0.0, ge=0, lt=1)
    """Share of its reward that a right answer loses for being long, compared with the right answers of its group;
    0: none. The reward in metrics and batches stays as it is."""


class SamplingConfig(BaseConfig):
    """How completions are sampled."""

    temperature: float = Field(1.0, gt=0, le=2)
    """Logits are divided by this. Above zero: greedy rollouts carry no gradient."""

    max_tokens: int = Field(64, ge=1)
    """Longest completion of one turn, in tokens."""


class EnvConfig(BaseConfig):
    """One environment of the run; several are sampled in equal parts."""

    id: str
    """Which environment: a built-in one, "verifiers:TASKSET", or "plugin:NAME" (docs/environments.md)."""

    name: Name | None = None
    """Name in metrics; null takes what the id ends in."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""

    env_vars: list[str] = Field(default_factory=list)
    """Environment variables that the process of the environment gets besides what every process needs (PATH, HOME and
    the like, docs/environments.md), by name. The API key of inference is never among them."""

    timeout_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    """Deadline of each step that the environment takes between two answers of the policy. Waiting for the policy does
    not count. A rollout that misses it is dropped."""

    reward_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest reward of the environment. A rollout with a reward outside of it is dropped."""

    @property
    def label(self) -> str:
        """The environment's name in metrics."""
        return self.name or self.id.rpartition(":")[2]

    @field_validator("id")
    @classmethod
    def _is_known(cls, env_id: str) -> str:
        if env_id in BUILT_IN_ENVS or PLUGGED_ENV.fullmatch(env_id):
            return env_id
        near = difflib.get_close_matches(env_id, BUILT_IN_ENVS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"found {env_id!r}; {hint}allowed are {', '.join(BUILT_IN_ENVS)}, verifiers:TASKSET and plugin:NAME"
        )

    @model_validator(mode="after")
    def _range_has_a_length(self) -> Self:
        low, high = self.reward_range
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"reward_range: found [{low}, {high}], must be two numbers, the lower one first")
        return self


class EvalSamplingConfig(BaseConfig):
    """How completions are sampled in evaluations; what is left out is as in `[sampling]`."""

    temperature: float | None = Field(None, ge=0, le=2)
    """Logits are divided by this; 0 always takes the most likely token; null: that of `[sampling]`."""

    max_tokens: int | None = Field(None, ge=1)
    """Longest completion of one turn, in tokens; null: that of `[sampling]`."""


class EvalConfig(BaseConfig):
    """Evaluation while the run trains."""

    interval: int = Field(10, ge=1)
    """Evaluate at every so many steps."""

    num_examples: int = Field(16, ge=1)
    """Examples of the eval split, from its start."""

    rollouts_per_example: int = Field(1, ge=1)
    """Rollouts for each of them."""

    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """Sampling of evaluations."""

    env: list[EnvConfig] | None = Field(None, min_length=1)
    """Environments of evaluations, one `[[eval.env]]` each; null: those of the run, on their eval split."""


class CkptConfig(BaseConfig):
    """The run's checkpoints."""

    interval: int = Field(10, ge=1)
    """Save after every so many steps, and after the last."""

    keep_last: int = Field(2, ge=1)
    """How many of the newest are kept."""

    keep_interval: int | None = Field(None, ge=1)
    """Checkpoints at multiples of this are kept for ever."""

    keep_rollouts: bool = False
    """Rollout files are kept for replay (`python -m prime_rl.trainer.selfcheck`); else those that a checkpoint covers
    are removed."""

    resume_step: int = Field(-1, ge=-1)
    """Where to start: -1 takes the newest complete checkpoint if there is one; 0 starts anew; N takes step N. What was
    made after that step is dropped, once for each change of the file."""


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class ClientConfig(BaseConfig):
    """Inference as the orchestrator reaches it."""

    base_url: ServerUrl | Annotated[list[ServerUrl], Field(min_length=1, max_length=64)] | None = None
    """URL that ends in /v1, or a list of them: requests are spread over all that answer. null takes the one in
    `inference/status.json`."""

    api_key_var: str = "PRL_API_KEY"
    """Name of the environment variable that holds the API key; the same name with `_FILE` may name a file instead that
    only its owner can read."""

    timeout_s: float = Field(120.0, gt=0)
    """Deadline of one request."""

    max_concurrent_requests: int = Field(64, ge=1)
    """Rollouts of this run that may be sampled at one time, on all servers together. A run begins with few, takes more
    as long as that brings more tokens a second, and half as many when inference is overloaded."""

    @property
    def urls(self) -> list[str | None]:
        """One a server; None stands for the one in the status file."""
        return list(self.base_url) if isinstance(self.base_url, list) else [self.base_url]

    @field_validator("base_url", mode="before")
    @classmethod
    def _no_password(cls, value: Any) -> Any:
        """First of all checks, and without the URL in its message: URLs are shown in logs and status files."""
        if any("@" in str(url).partition("://")[2].partition("/")[0] for url in [value, *_items(value)]):
            raise ValueError("a URL with a user or a password in it is shown in logs: use api_key_var for a key")
        return value

    @model_validator(mode="after")
    def _no_server_twice(self) -> Self:
        if len({url.rstrip("/") for url in self.urls if url}) < len([url for url in self.urls if url]):
            raise ValueError("base_url: one of the servers is named twice")
        return self


class OrchestratorConfig(BaseConfig):
    """`control/orch.toml`: the run's request."""

    batch_size: int = Field(ge=1)
    """Samples of one update, a multiple of `rollouts_per_example`."""

    rollouts_per_example: int = Field(ge=1)
    """Rollouts of one example: the group over which advantages are taken."""

    seq_len: int | None = Field(None, ge=8)
    """Longest sample in tokens; null takes the trainer's."""

    max_steps: int = Field(100, ge=1)
    """Updates until the run is finished."""

    max_async_level: int = Field(2, ge=0, le=16)
    """How many versions a rollout may lag behind the policy that it trains; 0 is strictly on-policy."""

    max_off_policy_steps: int | None = Field(None, ge=0)
    """Versions that a group may fall behind the newest while it is being generated: then it is cancelled and started
    again. At most `max_async_level`; null: the same, which never cancels what was started for its own batch."""

    oversampling_factor: float = Field(1.0, ge=1, le=4)
    """Groups in flight beyond those that the batches need, as a multiple of a batch: they stand in for groups that are
    dropped. What is not needed and gets too old is started again."""

    filter_zero_advantage: bool = False
    """Groups whose advantages are all zero are dropped and replaced. After four batches of them in one step they are
    taken all the same, and the log says so."""

    seed: int = Field(42, ge=0)
    """Seed of the example order and of the adapter's start."""

    model: RunModelConfig
    """Base model and adapter."""

    optim: OptimConfig = OptimConfig()
    """Optimizer."""

    scheduler: SchedulerConfig = SchedulerConfig()
    """Learning rate schedule."""

    loss: LossConfig = AipoLossConfig()
    """Loss and its constants."""

    advantage: AdvantageConfig = AdvantageConfig()
    """Advantages."""

    sampling: SamplingConfig = SamplingConfig()
    """Sampling."""

    env: list[EnvConfig] = Field(min_length=1)
    """Environments, one `[[env]]` each."""

    max_env_failure_share: float = Field(0.5, ge=0, le=1)
    """Share of the newest rollouts of an environment that may be dropped for its faults; above it the run fails."""

    eval: EvalConfig | None = None
    """Evaluation; null: none."""

    ckpt: CkptConfig = CkptConfig()
    """Checkpoints."""

    client: ClientConfig = ClientConfig()
    """Inference."""

    watch: WatchConfig = WatchConfig()
    """How new policy versions are noticed."""

    log: LogConfig = LogConfig()
    """Logging."""

    monitor: MonitorConfig = MonitorConfig()
    """Where metrics go beside `metrics/*.jsonl`."""

    samples: SamplesConfig = SamplesConfig()
    """Rollouts kept as text."""

    @property
    def groups_per_batch(self) -> int:
        return self.batch_size // self.rollouts_per_example

    @property
    def eval_envs(self) -> list[EnvConfig]:
        """The environments of evaluations; [] without evaluation."""
        return (self.eval.env or self.env) if self.eval else []

    @property
    def eval_sampling(self) -> SamplingConfig:
        """The sampling of evaluations. Its temperature may be 0."""
        own = self.eval.sampling.model_dump(exclude_none=True) if self.eval else {}
        return self.sampling.model_copy(update=own)

    @property
    def loss_length(self) -> int:
        """What stands for the length of a sample in a loss that divides by a constant, in tokens."""
        chosen = self.loss.length if isinstance(self.loss, DrGrpoLossConfig) else None
        return chosen or self.sampling.max_tokens

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.batch_size % self.rollouts_per_example:
            raise ValueError(
                f"batch_size: found {self.batch_size}, must be a multiple of "
                f"rollouts_per_example = {self.rollouts_per_example}"
            )
        if self.max_off_policy_steps is not None and self.max_off_policy_steps > self.max_async_level:
            raise ValueError(
                f"max_off_policy_steps: found {self.max_off_policy_steps}, must be at most "
                f"max_async_level = {self.max_async_level}"
            )
        lows = [env.reward_range[0] for env in self.env]
        if self.advantage.type == "maxrl" and min(lows) < 0:
            raise ValueError(
                "advantage.type: found 'maxrl', which needs a reward_range from 0 upwards in every [[env]]"
            )
        for table, envs in (("env", self.env), ("eval.env", (self.eval and self.eval.env) or [])):
            names = [env.label for env in envs]
            if len(set(names)) != len(names):
                raise ValueError(f"{table}: the names {names} are not distinct; set `name` in each [[{table}]]")
            if taken := {"mean", "std"} & set(names):
                raise ValueError(f"{table}: the name {min(taken)!r} is taken: reward/mean and reward/std are metrics")
        return self
