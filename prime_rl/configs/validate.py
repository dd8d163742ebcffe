"""The rules between a run and its trainer: pure, and the same in the trainer, in `prl` and in the TUI.

A run is checked twice: on its own (is the text TOML, are keys and values allowed: `load_run_config`) and against what
the trainer can hold (`check_against_trainer`). Both report all problems at once; `find_problems` joins them for people.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.configs.base import ConfigError, ConfigProblem, build, dump_toml, load_toml, merge
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.contract.layout import CONFIG_ERROR_PREFIX
from prime_rl.contract.types import MAX_BATCH_BYTES, full_batch_bytes

PARSE_ERROR_PREFIX = CONFIG_ERROR_PREFIX
# Above it an update of AdamW is larger than the weights of an adapter.
MAX_USUAL_LR = 1e-2
# The part of seq_len that max_tokens should leave for the prompt.
MIN_PROMPT_SHARE = 1 / 8
# Replace invalid values without a default, so that the rest can be checked. Two that depend on each other go
# together.
_STAND_INS: dict[str, dict[str, Any]] = {
    "batch_size": {"batch_size": 1, "rollouts_per_example": 1},
    "rollouts_per_example": {"batch_size": 1, "rollouts_per_example": 1},
    "env": {"env": [{"id": "upper-case"}]},
}
_MAX_LOOKS = 4
# The cure for what is too long for a workspace.
_LONGER = "; a longer one for all runs: prl down, then prl up --seq_len N"
_WRONG_WORKSPACE_FOR_LORA = (
    "this workspace fine-tunes the whole model: remove it, or add the run to a workspace with adapters"
)
_WRONG_WORKSPACE_FOR_WHOLE = (
    "this workspace trains adapters: remove it, "
    "or add the run to a workspace with full_finetune = true in its system file"
)


@dataclass(frozen=True)
class TrainerLimits:
    """Limits of a trainer for its runs. `max_rank` and `alpha` are None when it trains the whole model.

    `max_async_level` is the workspace's, None outside of one. `folder` is the one that relative names of models mean.
    """

    model: str
    max_seq_len: int
    max_rank: int | None
    alpha: float | None = None
    max_async_level: int | None = None
    folder: Path = Path()

    @classmethod
    def of(cls, trainer: TrainerConfig) -> TrainerLimits:
        """The limits of a trainer with this config."""
        lora = trainer.model.lora
        rank, alpha = (lora.rank, lora.alpha) if lora else (None, None)
        return cls(trainer.model.name, trainer.seq_len, rank, alpha, trainer.max_async_level)


def load_run_config(path: Path, overrides: Mapping[str, Any] | None = None) -> OrchestratorConfig:
    """Read a run's config. Raises ConfigError (ConfigParseError when it is not valid TOML)."""
    return build(OrchestratorConfig, merge(load_toml(path), overrides or {}), str(path))


def check_against_trainer(config: OrchestratorConfig, limits: TrainerLimits) -> list[ConfigProblem]:
    """Problems of `config` for this trainer; [] when it fits."""
    problems = []
    if not _same_model(config.model.name, limits):
        found = f"found {config.model.name!r}: must be the trainer's base model, {limits.model!r}"
        problems.append(ConfigProblem("model.name", found))
    problems += _adapter_problems(config, limits)
    if config.seq_len is not None and config.seq_len > limits.max_seq_len:
        found = f"found {config.seq_len}: must be at most the trainer's {limits.max_seq_len}{_LONGER}"
        problems.append(ConfigProblem("seq_len", found))
    level, room = config.max_async_level, limits.max_async_level
    if room is not None and level > room:
        found = f"found {level}: must be at most {room}, this workspace's limit"
        problems.append(ConfigProblem("max_async_level", f"{found} (max_async_level in its system file)"))
    seq_len = min(config.seq_len or limits.max_seq_len, limits.max_seq_len)
    if config.needs_inference and config.sampling.max_tokens >= seq_len:
        longer = "" if seq_len < limits.max_seq_len else f", with room for the prompt{_LONGER}"
        found = f"found {config.sampling.max_tokens}: must be below seq_len = {seq_len}{longer}"
        problems.append(ConfigProblem("sampling.max_tokens", found))
    if (full := full_batch_bytes(config.max_rollouts, seq_len, config.num_soft)) > MAX_BATCH_BYTES:
        texts = f" and {config.max_rollouts - config.batch_size} texts beside it" if config.data else ""
        found = f"found {config.batch_size}: with seq_len = {seq_len}{texts} a batch has up to {full >> 20} MiB"
        most = f"must be at most {MAX_BATCH_BYTES >> 20}; make one of them smaller"
        problems.append(ConfigProblem("batch_size", f"{found}, {most}"))
    return problems


def find_problems(data: Mapping[str, Any], source: str, limits: TrainerLimits | None) -> list[ConfigProblem]:
    """All problems of a run's config, also those hidden by others: wrong fields are dropped, and the rest is checked.

    Messages are those of `load_run_config` and `check_against_trainer`. `limits` is None when no trainer is known.
    """
    problems: list[ConfigProblem] = []
    try:
        dump_toml(data, source)
    except ConfigError as error:
        problems += error.problems
    for _ in range(_MAX_LOOKS):
        try:
            config = build(OrchestratorConfig, data, source)
        except ConfigError as error:
            new = [problem for problem in error.problems if problem not in problems]
            problems += new
            data = _left_out(data, [key_of(problem) for problem in new], limits)
        else:
            keys = {key_of(problem) for problem in problems}
            more = check_against_trainer(config, limits) if limits else []
            return problems + [problem for problem in more if problem.key not in keys]
    return problems


def doubts(config: OrchestratorConfig, limits: TrainerLimits | None) -> list[ConfigProblem]:
    """What a valid config allows and is rarely meant (docs/learning.md); `limits` is None when no trainer is known."""
    found = []
    trains_whole = config.model.trains_whole_model if limits is None else limits.max_rank is None
    if config.optim.type == "adamw" and config.optim.lr > MAX_USUAL_LR and not trains_whole:
        words = f"found {config.optim.lr:g}: above {MAX_USUAL_LR:g} most adapters break within a few updates"
        found.append(ConfigProblem("optim.lr", f"{words}; 1e-5 to 1e-3 is usual"))
    if not config.samples_rollouts:
        return found
    seq_len = config.seq_len or (limits.max_seq_len if limits else None)
    if seq_len is not None and 0 <= (room := seq_len - config.sampling.max_tokens) < MIN_PROMPT_SHARE * seq_len:
        words = f"found {config.sampling.max_tokens}: leaves the prompt {room} of seq_len = {seq_len} tokens"
        words += ", and answers to longer prompts are cut"
        found.append(ConfigProblem("sampling.max_tokens", f"{words}; lower it, or raise seq_len"))
    if config.groups_per_batch == 1:
        words = f"found {config.batch_size}, as rollouts_per_example: each update sees a single example"
        found.append(ConfigProblem("batch_size", f"{words}; 4 or more examples are usual"))
    has_advantages = config.teaching is None or config.teaching.reward_weight > 0
    if config.rollouts_per_example == 1 and config.advantage.type != "batch" and has_advantages:
        words = f"found {config.advantage.type!r} with rollouts_per_example = 1: a group of one has no advantage"
        found.append(ConfigProblem("advantage.type", f'{words}; "batch" compares with the other rollouts of the batch'))
    return found


def key_of(problem: ConfigProblem) -> str:
    """The full dotted key, also for a rule between fields, whose message begins with the key."""
    head, _, rest = problem.message.partition(": ")
    inner = head if rest and all(part.isidentifier() for part in head.split(".")) else ""
    return ".".join(part for part in (problem.key, inner) if part)


def _left_out(data: Mapping[str, Any], keys: list[str], limits: TrainerLimits | None) -> dict[str, Any]:
    rest = copy.deepcopy(dict(data))
    for key in keys:
        first, *inner = key.split(".")
        table: Any = rest
        for part in [first, *inner][:-1]:
            table = table.get(part) if isinstance(table, dict) else None
        if isinstance(table, dict) and first not in _STAND_INS:
            table.pop([first, *inner][-1], None)
        rest |= _STAND_INS.get(first, {})
    model = rest.get("model")
    named = isinstance(model, dict) and isinstance(model.get("name"), str)
    if not named:
        rest["model"] = {**(model if isinstance(model, dict) else {}), "name": limits.model if limits else "none"}
    return rest


def _adapter_problems(config: OrchestratorConfig, limits: TrainerLimits) -> list[ConfigProblem]:
    lora, max_rank = config.model.lora, limits.max_rank
    if max_rank is not None:
        problems = []
        if config.model.full_finetune:
            problems.append(ConfigProblem("model.full_finetune", f"found true: {_WRONG_WORKSPACE_FOR_WHOLE}"))
        if lora.rank is not None and lora.rank > max_rank:
            found = f"found {lora.rank}: must be at most the trainer's {max_rank}"
            problems.append(ConfigProblem("model.lora.rank", found))
        return problems
    tables = [f"model.lora.{name}" for name in sorted(lora.model_fields_set)] or ["model.lora"]
    has_table = "lora" in config.model.model_fields_set
    problems = [ConfigProblem(key, _WRONG_WORKSPACE_FOR_LORA) for key in tables if has_table]
    if config.init.from_ is not None:
        problems.append(ConfigProblem("init.from", f"found {config.init.from_!r}: {_WRONG_WORKSPACE_FOR_LORA}"))
    named = {"teacher": config.teacher, **{f"env.{at}.teacher": env.teacher for at, env in enumerate(config.env)}}
    for key, each in named.items():
        if each is not None and not each.base_url:
            rule = "must be a model at a base_url: inference has the weights that the run trains in place of the base"
            problems.append(ConfigProblem(key, f"found {each.model!r}: {rule}"))
    if config.model.full_finetune is False:
        problems.append(ConfigProblem("model.full_finetune", f"found false: {_WRONG_WORKSPACE_FOR_LORA}"))
    if config.optim.type == "muon":
        found = "found 'muon': only for adapters, this workspace fine-tunes the whole model"
        problems.append(ConfigProblem("optim.type", found))
    if config.loss.kl_coef:
        rule = "must be 0, since full fine-tuning keeps no base model to compare with"
        problems.append(ConfigProblem("loss.kl_coef", f"found {config.loss.kl_coef:g}: {rule}"))
    return problems


def resolve(config: OrchestratorConfig, limits: TrainerLimits) -> OrchestratorConfig:
    """Fill in the trainer's defaults: full_finetune, rank, alpha, seq_len. Call it for a config without problems."""
    decided: dict[str, Any] = {"full_finetune": limits.max_rank is None}
    if limits.max_rank is not None:
        lora = config.model.lora
        own = {"rank": lora.rank or limits.max_rank, "alpha": lora.alpha or limits.alpha}
        decided["lora"] = lora.model_copy(update=own)
    model = config.model.model_copy(update=decided)
    return config.model_copy(update={"model": model, "seq_len": config.seq_len or limits.max_seq_len})


def explain(error: ConfigError) -> str:
    """The text of `config_validation_error.txt`: one line a problem, with the file."""
    return f"{PARSE_ERROR_PREFIX}: " + "\n".join(f"{error.source}: {problem}" for problem in error.problems)


def _same_model(wanted: str, limits: TrainerLimits) -> bool:
    if wanted == limits.model:
        return True
    wanted_path, held_path = limits.folder / wanted, limits.folder / limits.model
    return wanted_path.exists() and held_path.exists() and wanted_path.resolve() == held_path.resolve()
