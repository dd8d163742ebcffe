"""Config of one run: its `control/orch.toml`. Read by its orchestrator and by the trainer.

Only `[[env]]`, `batch_size`, `rollouts_per_example` and `model.name` have no default. rank, alpha and seq_len default
to the trainer's: `validate.resolve`. `[init]` is where a run starts, `[budget]` and `[stop]` end it before `max_steps`.
TOML has no null: "null" in a help text below means that the key is omitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import ConfigDict, Field, field_validator, model_validator

from prime_rl.configs.base import (
    NARROWING,
    BaseConfig,
    EvalSamplingConfig,
    LogConfig,
    SamplingConfig,
    WatchConfig,
    check_address,
)
from prime_rl.configs.data import DataConfig, SftConfig
from prime_rl.configs.distill import DistillConfig, Teacher, TeacherConfig, adapters_of
from prime_rl.configs.envs import EnvConfig
from prime_rl.configs.losses import AipoLossConfig, DrGrpoLossConfig, LossConfig
from prime_rl.configs.reports import MonitorConfig, SamplesConfig
from prime_rl.contract.metrics import OF_TEXTS
from prime_rl.contract.served import MAX_TEACHER_ADAPTERS, RANGES
from prime_rl.contract.types import MAX_BRANCHES, Kind

# Keys of `orch.toml` that are read while the run is in its slot; it keeps all others as it was admitted.
LIVE_KEYS = ("weight", "priority", "preempt", "budget", "tags")

RunT = TypeVar("RunT", bound="RunLifetime")


class InitConfig(BaseConfig):
    """Where the run's adapter starts, in place of random weights."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    from_: str | None = Field(None, alias="from", min_length=1, max_length=1024)
    """`run_a` (its newest version), `run_a@v20`, a folder with a PEFT adapter, or the name of one on the Hugging Face
    hub. Its rank may be at most the run's own: it is padded with zeros. Read once, when the run is added."""


class BudgetConfig(BaseConfig):
    """Limits of what the run may use. At the first that is reached it is finished, after a checkpoint."""

    max_tokens: int | None = Field(None, ge=1)
    """Tokens sampled, evaluations included; null: no limit."""

    max_hours: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Hours of the run's orchestrator at work, over all its starts; pauses do not count. null: no limit."""


class StopConfig(BaseConfig):
    """Ends the run when a metric has stopped getting better."""

    metric: str = Field(min_length=1, max_length=200)
    """A metric of `metrics/orchestrator.jsonl`, such as "reward/mean"; "eval/pass@1" is the mean over environments. Of
    the trainer's those of texts: "held_out/loss"."""

    mode: Literal["max", "min"] = "max"
    """Whether more is better, or less."""

    patience: int = Field(5, ge=1)
    """How many values in a row may bring nothing better before the run is finished."""

    min_delta: float = Field(0.0, ge=0, allow_inf_nan=False)
    """How much better than the best before a value must be."""

    min_steps: int = Field(0, ge=0)
    """No stop before this step."""


class RunLifetime(BaseConfig):
    """Keys of `orch.toml` about the run's life among others: its tags, its share, its beginning and its end."""

    tags: list[str] = Field(default=[], max_length=32)
    """Words to filter and group runs by, each of 1 to 64 letters, digits and ._:=-"""

    weight: float = Field(1.0, gt=0, le=1000, allow_inf_nan=False)
    """The run's share of the trainer's tokens while others have work too, relative to theirs. Read while it runs."""

    priority: int = Field(0, ge=-1000, le=1000)
    """Runs that wait for a slot are admitted by priority, highest first, then by age. Read while it runs."""

    preempt: bool = False
    """Whether the run may take the slot of a run of lower priority, which is saved, waits, and continues later."""

    init: InitConfig = InitConfig()
    """Where the adapter starts."""

    budget: BudgetConfig = BudgetConfig()
    """What the run may use. Read while it runs."""

    stop: StopConfig | None = None
    """An early stop; null: off."""

    @model_validator(mode="after")
    def _plain_tags(self) -> Self:
        for tag in self.tags:
            if not 1 <= len(tag) <= 64 or not all(c.isalnum() or c in "._:=-" for c in tag):
                raise ValueError(f"tags: invalid tag {tag!r}: must be 1 to 64 letters, digits and . _ : = -")
        return self


def with_live_keys(config: RunT, changed: RunLifetime) -> RunT:
    """`config` with the live keys of `changed`; the same object when they are equal."""
    live = {key: getattr(changed, key) for key in LIVE_KEYS}
    return config if all(getattr(config, key) == value for key, value in live.items()) else config.replace(**live)


ServerUrl = Annotated[str, Field(pattern=r"^https?://[^/\s]+(/\S*)?$")]
Beta = Annotated[float, Field(ge=0, lt=1)]
RewardName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,63}$")]
AdvantageType = Literal["mean", "grpo", "rloo", "dr_grpo", "maxrl", "batch"]


class RunLoRAConfig(BaseConfig):
    """The run's adapter."""

    rank: int | None = Field(None, ge=1, le=512)
    """LoRA rank; at most the trainer's; null takes the trainer's."""

    alpha: float | None = Field(None, gt=0)
    """LoRA alpha; null takes the trainer's."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the run's weights and published adapter. bfloat16: rounded after every update; gradients
    and the optimizer's moments stay in float32."""


class RunModelConfig(BaseConfig):
    """The model that the run trains."""

    name: str
    """The base model; must be the trainer's base model."""

    lora: RunLoRAConfig = RunLoRAConfig()
    """The run's adapter. A trainer that fine-tunes the whole model refuses this table."""

    full_finetune: bool | None = None
    """Whether the run trains the whole model; null takes the trainer's setting, any other value must equal it."""

    @property
    def trains_whole_model(self) -> bool | None:
        """The setting of this config; None when it is left to the trainer."""
        return False if self.full_finetune is None and "lora" in self.model_fields_set else self.full_finetune

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.full_finetune and "lora" in self.model_fields_set:
            raise ValueError("full_finetune: remove [model.lora], full fine-tuning has no adapters")
        return self


class OptimConfig(BaseConfig):
    """The run's optimizer."""

    type: Literal["adamw", "adam", "nadam", "radam", "adamax", "rmsprop", "adagrad", "sgd", "muon"] = "adamw"
    """The optimizer: torch's own, or Muon in float32. adam equals adamw: weight decay is decoupled in all of them."""

    lr: float = Field(1e-4, gt=0, allow_inf_nan=False)
    """Peak learning rate."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running mean and of the running square (adamax: of the running maximum). sgd and muon: the first is
    the momentum. rmsprop: the second is its alpha, without momentum. adagrad uses neither."""

    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Decoupled weight decay: before each update the weights shrink by lr x weight_decay, whatever the type."""

    max_norm: float = Field(1.0, ge=0)
    """Gradient clipping: largest norm of the run's gradient; 0: off."""


class SchedulerConfig(BaseConfig):
    """The run's learning rate schedule."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up: constant, or decaying to `min_lr_ratio` at `max_steps`."""

    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from zero."""

    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate divided by the peak."""


class AdvantageConfig(BaseConfig):
    """The way from rewards of one group (all rollouts of one example) to advantages."""

    type: AdvantageType = "grpo"
    """mean and dr_grpo: A = R - mean. grpo: (R - mean) / (std + 1e-6). rloo: R - mean of the others. maxrl: (R - mean)
    / mean. batch: R - mean of all others of the environment in the batch, for one rollout an example. See
    `docs/advantages.md`."""

    length_penalty: float = Field(0.0, ge=0, lt=1)
    """Share of its reward that a right answer loses for being long, compared with the right answers of its group;
    0: off. The reward in metrics and batches does not change."""

    mask_truncated: bool = False
    """Learn nothing from a rollout that was cut at a token limit: none of its tokens has a loss. Its reward counts for
    its group."""

    reward_weights: dict[RewardName, Annotated[float, Field(allow_inf_nan=False)]] = Field({}, max_length=16)
    """Single rewards of the environments to learn from, with their weights, for example
    `{ accuracy = 1.0, format = 0.2 }`: each gets its own advantages over the group, and their weighted sum
    counts. Every rollout must have all of them. Empty: the one reward of the environment."""


class EvalConfig(BaseConfig):
    """Evaluation during training."""

    interval: int = Field(10, ge=1)
    """Evaluate every N steps."""

    num_examples: int = Field(16, ge=1)
    """Number of examples, from the start of the eval split."""

    rollouts_per_example: int = Field(1, ge=1)
    """Rollouts per example: the k of `avg@k`. `pass@k` is reported for every power of two up to it."""

    pass_reward: float | None = None
    """Lowest reward of a rollout that has passed; null: the highest of the environment's `reward_range`."""

    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """Sampling of evaluations."""

    env: list[EnvConfig] | None = Field(None, min_length=1)
    """Environments of evaluations, one `[[eval.env]]` each; null: those of the run, on their eval split."""


class CkptConfig(BaseConfig):
    """The run's checkpoints."""

    interval: int = Field(10, ge=1)
    """Save every N steps, and after the last."""

    keep_last: int = Field(2, ge=1)
    """How many of the newest checkpoints are kept."""

    keep_interval: int | None = Field(None, ge=1)
    """Checkpoints at multiples of this step are kept forever."""

    keep_rollouts: bool = False
    """Keep all rollout files for replay (`python -m benchmarks.selfcheck`), at most 50,000 of them. Otherwise those
    that a checkpoint covers are removed."""

    resume_step: int = Field(-1, ge=-1)
    """Where to start: -1 takes the newest complete checkpoint, if any; 0 starts over; N takes step N. What was made
    after that step is removed, once for each change of the file."""


class ClientConfig(BaseConfig):
    """The connection from the orchestrator to inference."""

    base_url: ServerUrl | Annotated[list[ServerUrl], Field(min_length=1, max_length=64)] | None = None
    """URL that ends in /v1, or a list of them: requests are spread over all that answer. null takes all
    servers of the workspace, as they come and go."""

    api_key_var: str = "PRL_API_KEY"
    """Name of the environment variable that holds the API key; the same name with `_FILE` may name a file instead that
    only its owner can read."""

    timeout_s: float = Field(120.0, gt=0)
    """Deadline of one request, in seconds."""

    max_concurrent_requests: int = Field(64, ge=1)
    """Largest number of concurrent rollouts of this run, over all servers. A run begins with few, adds more as long as
    throughput rises, and halves them when inference is overloaded."""

    @property
    def urls(self) -> list[str | None]:
        """One URL per server; None: the one in the status file."""
        return list(self.base_url) if isinstance(self.base_url, list) else [self.base_url]

    @field_validator("base_url", mode="before")
    @classmethod
    def _no_password(cls, value: Any) -> Any:
        """Checked first, and without the URL in its message: URLs are shown in logs and status files."""
        for url in value if isinstance(value, list) else [value]:
            check_address(str(url))
        return value

    @model_validator(mode="after")
    def _no_server_twice(self) -> Self:
        if len({url.rstrip("/") for url in self.urls if url}) < len([url for url in self.urls if url]):
            raise ValueError("base_url: duplicate server")
        return self


# Keys that mean nothing for a run that makes no rollouts.
_OF_ROLLOUTS = (
    *("max_off_policy_steps", "oversampling_factor", "filter_zero_advantage", "settled_share"),
    *("advantage", "env"),
)
# Those of a run that learns texts alone, and of one that has a teacher.
_OF_TEXTS, _OF_TEACHERS = ("data", "sft"), ("teacher", "distill")

KINDS: tuple[Kind, ...] = get_args(Kind)


def of_kind(data: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The config `data` for a run of another `kind`: without what only its own kind has."""
    tables = {key: each for key, each in data.items() if isinstance(each, Mapping)}
    before, metric = data.get("kind", "rl"), str(tables.get("stop", {}).get("metric"))
    if kind == before:
        return dict(data)
    left_out: set[str] = {*_OF_TEXTS} if "sft" in (before, kind) else set()
    left_out |= {*_OF_TEACHERS} if before == "distill" else set()
    gone = ("reward", "distill/") if kind == "sft" else ("distill/",) if before == "distill" else OF_TEXTS
    left_out |= {"stop"} if metric.startswith(gone) else set()
    if kind == "sft":
        has_envs = bool(tables.get("eval", {}).get("env"))
        left_out |= {*_OF_ROLLOUTS, "rollouts_per_example", "loss", *(() if has_envs else ("eval",))}
    found = {key: value for key, value in data.items() if key not in left_out} | {"kind": kind}
    if before == "distill" and isinstance(envs := found.get("env"), list):
        found["env"] = [
            {key: each for key, each in env.items() if key != "teacher"} if isinstance(env, Mapping) else env
            for env in envs
        ]
    if kind == "distill" and "sampling" in tables:
        kept = {key: each for key, each in tables["sampling"].items() if key not in ("temperature", *NARROWING)}
        found["sampling"] = kept
    if "loss" in left_out and (kl_coef := tables.get("loss", {}).get("kl_coef")):
        found["loss"] = {"kl_coef": kl_coef}
    return found


class OrchestratorConfig(RunLifetime):
    """`control/orch.toml`: the config of one run."""

    kind: Kind = "rl"
    """What the run learns from: "rl", rollouts and their rewards; "sft", the texts of `[[data]]` (docs/sft.md);
    "distill", rollouts and what a teacher says about each of their tokens (docs/distill.md)."""

    batch_size: int = Field(ge=1)
    """Rollouts per update, a multiple of `rollouts_per_example`; of a run that learns texts, texts."""

    rollouts_per_example: int = Field(ge=1, le=int(RANGES["n"].highest))
    """Rollouts per example: the group over which advantages are computed. With a teacher 1 unless it is set."""

    seq_len: int | None = Field(None, ge=8)
    """Longest sample in tokens; null takes the trainer's."""

    max_steps: int = Field(100, ge=1)
    """Updates until the run has finished."""

    max_async_level: int = Field(2, ge=0, le=16)
    """How many versions a rollout may lag behind the policy that it trains; 0 is strictly on-policy. So far ahead are
    batches of texts made, too."""

    max_off_policy_steps: int | None = Field(None, ge=0)
    """Versions that a group may fall behind the newest while it is being generated; beyond that it is cancelled and
    started again. At most `max_async_level`; null: the same, which never cancels a group started for its own batch."""

    oversampling_factor: float = Field(1.0, ge=1, le=4)
    """Groups in flight beyond those that the batches need, as a multiple of a batch: they replace groups that are
    dropped. Unneeded ones that get too old are started again."""

    filter_zero_advantage: bool = False
    """Drop and replace groups whose advantages are all zero. After four batches of them in one step they are used, with
    a line in the log."""

    settled_share: float = Field(1.0, gt=0, le=1)
    """How often a settled example is drawn, as a share of how often others are; 1: as often. Settled are examples whose
    last group had the highest reward of `reward_range` throughout, or the lowest."""

    seed: int = Field(42, ge=0)
    """Seed of the example order, of the sampling and of the adapter's initial weights."""

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

    env: list[EnvConfig]
    """Environments, one `[[env]]` each."""

    data: list[DataConfig] = Field([])
    """Texts to learn, one `[[data]]` for each source."""

    sft: SftConfig = SftConfig()
    """How texts are learned."""

    teacher: Teacher | None = None
    """With `kind = "distill"`: the teacher of all environments that name none. Read once, when the run is added."""

    distill: DistillConfig = DistillConfig()
    """How a teacher is learned from."""

    max_env_failure_share: float = Field(0.5, ge=0, le=1)
    """Largest share of an environment's newest rollouts that may be dropped for its faults, and of its examples that
    may be unusable; above it the run fails."""

    eval: EvalConfig | None = None
    """Evaluation; null: off."""

    ckpt: CkptConfig = CkptConfig()
    """Checkpoints."""

    client: ClientConfig = ClientConfig()
    """Inference."""

    watch: WatchConfig = WatchConfig()
    """How new policy versions are detected."""

    log: LogConfig = LogConfig()
    """Logging."""

    monitor: MonitorConfig = MonitorConfig()
    """Where metrics go in addition to `metrics/*.jsonl`."""

    samples: SamplesConfig = SamplesConfig()
    """Rollouts kept as text."""

    @property
    def groups_per_batch(self) -> int:
        """Number of examples in a batch."""
        return self.batch_size // self.rollouts_per_example

    @property
    def max_branches(self) -> int:
        """Samples that a rollout or a text may become, at most."""
        return MAX_BRANCHES if self.data else max(env.max_branches for env in self.env)

    @property
    def max_rollouts(self) -> int:
        """Rollouts and texts of a batch, at most."""
        return self.batch_size + self.texts_per_batch + sum(source.max_held_out for source in self.data)

    @property
    def texts_per_batch(self) -> int:
        """Texts beside the rollouts of a batch."""
        return math.ceil(self.sft.share * self.batch_size) if self.samples_rollouts and self.data else 0

    @property
    def samples_rollouts(self) -> bool:
        """True when the run learns from what its policy samples."""
        return self.kind != "sft"

    @property
    def teaching(self) -> DistillConfig | None:
        """How a teacher is learned from; None for a run that has none."""
        return self.distill if self.kind == "distill" else None

    @property
    def num_soft(self) -> int:
        """Tokens of a teacher that stand in a batch for each that is learned, at most."""
        return self.distill.top_k if self.teaching and self.distill.objective == "forward_kl" else 0

    @property
    def teachers(self) -> dict[str, TeacherConfig]:
        """The teacher of each environment, by its name in metrics; {} for a run that has none."""
        chosen = {env.label: env.teacher or self.teacher for env in self.env}
        return {name: each for name, each in chosen.items() if each} if self.teaching else {}

    @property
    def teacher_adapters(self) -> list[str]:
        """The adapters that teach; the place of each is the number of the run's copy of it."""
        return adapters_of(self.teachers.values())

    @property
    def needs_inference(self) -> bool:
        """True when anything is sampled."""
        return self.samples_rollouts or self.eval is not None

    @property
    def needs_gateway(self) -> bool:
        """True when rollouts of an environment ask the policy through the gateway."""
        return any(env.needs_gateway for env in [*self.env, *self.eval_envs])

    @property
    def eval_envs(self) -> list[EnvConfig]:
        """The environments of evaluations; [] without evaluation."""
        return (self.eval.env or self.env) if self.eval else []

    @property
    def key_variables(self) -> list[str]:
        """The environment variables of the keys that it needs: of inference, of judges, and of teachers."""
        judges = (env.agent.judge for env in [*self.env, *self.eval_envs] if env.agent)
        others = (each.api_key_var for each in [*judges, *self.teachers.values()] if each)
        return [self.client.api_key_var, *(name for name in others if name)]

    @property
    def pass_rewards(self) -> dict[str, float]:
        """Lowest reward that passes an evaluation, by the environments' names in metrics."""
        chosen = self.eval.pass_reward if self.eval else None
        return {env.label: env.reward_range[1] if chosen is None else chosen for env in self.eval_envs}

    @property
    def eval_sampling(self) -> SamplingConfig:
        """The sampling of evaluations. Its temperature may be 0."""
        own = self.eval.sampling.model_dump(exclude_none=True) if self.eval else {}
        return self.sampling.model_copy(update=own)

    @property
    def sampling_seed(self) -> int:
        """`sampling.seed`, or the run's `seed` when that is null."""
        return self.seed if self.sampling.seed is None else self.sampling.seed

    @property
    def loss_length(self) -> int:
        """The constant length of a sample, in tokens, for losses that divide by one."""
        chosen = self.loss.length if isinstance(self.loss, DrGrpoLossConfig) else None
        return chosen or self.sampling.max_tokens

    @model_validator(mode="before")
    @classmethod
    def _has_no_groups(cls, data: Any) -> Any:
        """A run that makes no rollouts needs neither groups of them nor environments; one with a teacher no groups."""
        kind = data.get("kind") if isinstance(data, Mapping) else None
        if kind == "sft":
            return {"rollouts_per_example": 1, "env": [], **data}
        return {"rollouts_per_example": 1, **data} if kind == "distill" else data

    @model_validator(mode="after")
    def _learns_from_what_it_has(self) -> Self:
        if self.samples_rollouts and not self.env:
            raise ValueError("env: must have at least one [[env]]")
        if self.kind == "sft":
            if not self.data:
                raise ValueError('data: must have at least one [[data]] with kind = "sft"')
            if wrong := [key for key in _OF_ROLLOUTS if key in self.model_fields_set and getattr(self, key)]:
                raise ValueError(f'{wrong[0]}: remove it: with kind = "sft" there are no rollouts')
            if self.rollouts_per_example != 1:
                raise ValueError('rollouts_per_example: remove it: with kind = "sft" there are no rollouts')
            if self.loss.model_fields_set - {"type", "kl_coef"} or self.loss.type != "aipo":
                raise ValueError('loss: with kind = "sft" the loss is the cross-entropy: only kl_coef may be set')
            if self.stop is not None and self.stop.metric.startswith("reward"):
                raise ValueError('stop.metric: with kind = "sft" there are no rewards: "held_out/loss" is usual')
            if self.eval is not None and not self.eval.env:
                raise ValueError('eval.env: must name environments: with kind = "sft" there are no others')
        names = [source.label for source in self.data]
        if len(set(names)) != len(names):
            raise ValueError(f"data: duplicate names {names}: set a distinct `name` in each [[data]]")
        return self

    @model_validator(mode="after")
    def _has_its_teachers(self) -> Self:
        tables: dict[str, Any] = {"": self, **{f"env.{number}.": env for number, env in enumerate(self.env)}}
        if self.teaching is None:
            if self.distill != DistillConfig():
                raise ValueError('distill: only used with kind = "distill": remove it')
            if named := [table for table, each in tables.items() if each.teacher]:
                raise ValueError(f'{named[0]}teacher: only used with kind = "distill": remove it')
        if self.eval is not None and any(env.teacher for env in self.eval.env or []):
            raise ValueError("eval.env: nothing is learned in evaluations: remove teacher")
        if self.teaching is None:
            return self
        if missing := [env.label for env in self.env if env.label not in self.teachers]:
            raise ValueError(f'teacher: must be set with kind = "distill", here or in the [[env]] {missing[0]!r}')
        if len(adapters := self.teacher_adapters) > MAX_TEACHER_ADAPTERS:
            rule = f"must be at most {MAX_TEACHER_ADAPTERS}, the others at a base_url"
            raise ValueError(f"teacher: found the adapters {', '.join(adapters)}: {rule}")
        if self.sampling.temperature != 1:
            found = f"found {self.sampling.temperature:g}: must be 1"
            raise ValueError(f"sampling.temperature: {found}, as a teacher's probabilities are")
        if narrow := self.sampling.narrows:
            rule = "a teacher's probabilities are those of all tokens"
            raise ValueError(f'sampling.{narrow[0]}: remove it: with kind = "distill" {rule}')
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.batch_size % self.rollouts_per_example:
            raise ValueError(
                f"batch_size: found {self.batch_size}: must be a multiple of "
                f"rollouts_per_example = {self.rollouts_per_example}"
            )
        if self.max_off_policy_steps is not None and self.max_off_policy_steps > self.max_async_level:
            raise ValueError(
                f"max_off_policy_steps: found {self.max_off_policy_steps}: must be at most "
                f"max_async_level = {self.max_async_level}"
            )
        if self.advantage.type == "maxrl" and any(env.reward_range[0] < 0 for env in self.env):
            raise ValueError(
                "advantage.type: found 'maxrl', which requires a non-negative reward_range in every [[env]]"
            )
        if sum(env.sessions is not None for env in self.env) > 1:
            raise ValueError('env: found several with id = "sessions": a client could not tell them apart, keep one')
        if any(env.sessions for env in self.eval_envs):
            raise ValueError(
                'eval.env: nobody opens sessions for an evaluation: name environments that are not "sessions"'
            )
        for table, envs in (("env", self.env), ("eval.env", (self.eval and self.eval.env) or [])):
            names = [env.label for env in envs]
            if len(set(names)) != len(names):
                raise ValueError(f"{table}: duplicate names {names}: set a distinct `name` in each [[{table}]]")
            if taken := {"mean", "std"} & set(names):
                raise ValueError(
                    f"{table}: the name {min(taken)!r} is reserved: reward/mean and reward/std are metrics"
                )
        return self
