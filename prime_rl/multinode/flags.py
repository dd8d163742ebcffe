"""The command line of one node: every flag that is missing, contradictory or out of range is one line.

Pure: it reads no file but the TOML that it is given.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_rl.configs.base import build, merge, read_argv
from prime_rl.configs.multinode import MultinodeConfig
from prime_rl.configs.node_flags import DEFAULT_TOML, FlagError, node_parser
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.rank_files import Split
from prime_rl.multinode.records import RlPhase

_SPLITS: Mapping[str | None, frozenset[Split]] = {
    None: frozenset({"train", "eval"}),
    "train-only": frozenset({"train"}),
    "eval-only": frozenset({"eval"}),
}


@dataclass(frozen=True)
class NodeFlags:
    """The settings that one node was started with. `log_path` is the output_dir."""

    data_path: Path
    log_path: Path
    rl_phase: RlPhase
    rank: int
    num_nodes: int
    weights: tuple[float, ...]
    eval_interval: int | None
    splits: frozenset[Split]
    max_iterations: int | None
    master_addr: str | None
    elastic: bool
    dry_run: bool
    config: MultinodeConfig

    def fingerprint(self, code_version: str) -> dict[str, str]:
        """The settings that have to be equal on all nodes, by flag."""
        weights = ",".join(f"{weight:g}" for weight in self.weights)
        return {
            "--num-nodes": str(self.num_nodes),
            "--rank-weights": weights,
            "--rl-phase": str(self.rl_phase),
            "--eval-interval": str(self.eval_interval),
            "--rollout-split": ",".join(sorted(self.splits)),
            "--max-iterations": str(self.max_iterations),
            "--elastic": str(self.elastic),
            "--log-path": str(self.log_path.resolve()),
            "code version": code_version,
            **flatten(self.config.model_dump(mode="json", exclude={"log", "gpus_per_node"})),
        }


def num_ranks(flags: NodeFlags, num_gpus: Callable[[], int]) -> int:
    """Ranks of the trainer on this node; `num_gpus` counts its GPUs. Raises FlagError for more ranks than GPUs."""
    wanted = flags.config.gpus_per_node
    found = 0 if flags.config.trainer.get("device") == "cpu" else num_gpus()
    if wanted and found and wanted > found:
        raise FlagError(f"--gpus-per-node {wanted}: this node has {found}, by nvidia-smi -L and CUDA_VISIBLE_DEVICES")
    return wanted or found or 1


def flatten(value: object, key: str = "") -> dict[str, str]:
    """Each value of a config by its dotted key, for short messages about differences."""
    if isinstance(value, dict) and value:
        parts = [flatten(part, f"{key}.{name}" if key else str(name)) for name, part in value.items()]
        return {name: text for part in parts for name, text in part.items()}
    return {key: str(value)}


def parse_flags(argv: Sequence[str], environment: Mapping[str, str]) -> NodeFlags:
    """Raises FlagError, or ConfigError for the TOML and its overrides."""
    found, rest = node_parser().parse_known_args(list(argv))
    for word in rest:
        key = word.removeprefix("--").partition("=")[0].partition(".")[0]
        if word.startswith("--") and key not in MultinodeConfig.model_fields:
            raise FlagError(f"unknown flag {word}: prl multinode start --help lists all flags")
    for name, path in (("--data-path", found.data_path), ("--log-path", found.log_path)):
        if path is None:
            raise FlagError(f"{name} is required: a folder that all nodes share")
    if not found.data_path.is_dir():
        raise FlagError(f"--data-path {found.data_path}: folder not found")
    num_nodes = _at_least("--num-nodes", found.num_nodes, 1)
    rank = _rank(found, environment, num_nodes)
    if found.rl_phase not in list(RlPhase):
        raise FlagError(f"--rl-phase {found.rl_phase}: must be one of {', '.join(RlPhase)}")
    rl_phase = RlPhase(found.rl_phase)
    if found.eval_interval is not None and rl_phase is RlPhase.UPDATE:
        raise FlagError("--eval-interval requires --rl-phase both or rollout: an update evaluates nothing")
    if found.master_addr and rank:
        raise FlagError(f"--master-addr requires --master, but this is rank {rank}: workers get it from the master")
    if found.resume and not OutputDir(found.log_path).list_iterations():
        raise FlagError(f"--resume: nothing to resume in {found.log_path}; remove it to begin")
    data, source = read_argv(rest)
    if source == "command line":
        data, source = merge(read_argv(["@", str(DEFAULT_TOML)])[0], data), str(DEFAULT_TOML)
    if found.debug_mode:
        data = merge(data, {"log": {"level": "debug"}})
    if found.gpus_per_node is not None:
        data = merge(data, {"gpus_per_node": _at_least("--gpus-per-node", found.gpus_per_node, 1)})
    config = _with_model_of(found.data_path.resolve(), build(MultinodeConfig, data, source))
    if found.eval_interval is not None and not config.run.get("eval"):
        raise FlagError(f"--eval-interval: {source} has no [run.eval]: add what to evaluate")
    return NodeFlags(
        data_path=found.data_path.resolve(),
        log_path=found.log_path,
        rl_phase=rl_phase,
        rank=rank,
        num_nodes=num_nodes,
        weights=_weights(found.rank_weights, num_nodes),
        eval_interval=None if found.eval_interval is None else _at_least("--eval-interval", found.eval_interval, 1),
        splits=_splits(found),
        max_iterations=None if found.max_iterations is None else _at_least("--max-iterations", found.max_iterations, 1),
        master_addr=found.master_addr,
        elastic=found.elastic,
        dry_run=found.dry_run,
        config=config,
    )


def _with_model_of(data_path: Path, config: MultinodeConfig) -> MultinodeConfig:
    """A model's name that is a folder below the data path means that folder."""
    folder = data_path / config.model.name
    if not folder.is_dir():
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"name": str(folder)})})


def _rank(found: argparse.Namespace, environment: Mapping[str, str], num_nodes: int) -> int:
    if found.master and found.worker is not None:
        raise FlagError("--master and --worker exclude each other: use one of them")
    if found.master:
        return 0
    if found.worker is not None:
        if num_nodes == 1:
            raise FlagError(f"--worker {found.worker}: invalid with --num-nodes 1, which has no workers")
        if not 1 <= found.worker < num_nodes:
            raise FlagError(f"--worker {found.worker}: must be from 1 to {num_nodes - 1} with --num-nodes {num_nodes}")
        return int(found.worker)
    for name in ("RANK", "NODE_RANK"):
        if value := environment.get(name):
            if not value.isdecimal() or int(value) >= num_nodes:
                raise FlagError(f"{name}={value}: must be from 0 to {num_nodes - 1} with --num-nodes {num_nodes}")
            return int(value)
    if num_nodes == 1:
        return 0
    raise FlagError("--master or --worker R is required (or RANK or NODE_RANK in the environment)")


def _weights(text: str | None, num_nodes: int) -> tuple[float, ...]:
    if text is None:
        if num_nodes == 1:
            return (1.0,)
        raise FlagError(f"--rank-weights is required: {num_nodes} numbers, such as {','.join(['1'] * num_nodes)}")
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise FlagError(f"--rank-weights {text}: must be numbers separated by commas") from None
    if len(weights) != num_nodes:
        raise FlagError(f"--rank-weights {text}: {len(weights)} numbers, expected one per node: {num_nodes}")
    if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise FlagError(f"--rank-weights {text}: must be 0 or more, and not all 0")
    return weights


def _splits(found: argparse.Namespace) -> frozenset[Split]:
    if found.rollout_split not in _SPLITS:
        raise FlagError(f"--rollout-split {found.rollout_split}: must be train-only or eval-only, or omitted for both")
    if found.rollout_split == "eval-only" and found.eval_interval is None:
        raise FlagError("--rollout-split eval-only requires --eval-interval N: without it nothing is evaluated")
    if found.rollout_split == "train-only" and found.eval_interval is not None:
        raise FlagError("--rollout-split train-only and --eval-interval exclude each other: remove one of them")
    if found.rollout_split and found.rl_phase != RlPhase.ROLLOUT:
        raise FlagError(
            f"--rollout-split requires --rl-phase rollout, found {found.rl_phase}: an update needs rollouts"
        )
    return _SPLITS[found.rollout_split]


def _at_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise FlagError(f"{name} {value}: must be {least} or more")
    return value
