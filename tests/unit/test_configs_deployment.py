"""The table `[deployment]`: what it computes, and what it refuses in one line."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from prime_rl.configs.system import DeploymentConfig


def test_defaults_are_one_process_each_on_this_machine() -> None:
    table = DeploymentConfig()
    assert (table.engine, table.trainer.ranks, table.inference.replicas) == ("local", 1, 1)
    assert table.inference.devices(0) == ()


@pytest.mark.parametrize(
    ("trainer", "ranks"),
    [
        ({"ranks_per_node": 2}, 2),
        ({"gpus_per_node": 8}, 8),
        ({"gpus": [0, 1, 2]}, 3),
        ({"gpus": [0, 1], "ranks_per_node": 1}, 1),
    ],
)
def test_ranks_follow_the_gpus(trainer: dict[str, Any], ranks: int) -> None:
    assert DeploymentConfig.model_validate({"trainer": trainer}).trainer.ranks == ranks


def test_replicas_divide_the_gpus() -> None:
    inference = DeploymentConfig.model_validate({"inference": {"replicas": 2, "gpus": [4, 5, 6, 7]}}).inference
    assert [inference.devices(replica) for replica in range(2)] == [(4, 5), (6, 7)]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"trainer": {"nodes": 2}}, 'trainer.nodes = 2: engine "local" has one machine; use slurm or ray'),
        ({"trainer": {"min_nodes": 2}}, "min_nodes = 2: must not exceed nodes = 1"),
        ({"trainer": {"gpus": [0, 0]}}, "each number must occur once"),
        ({"trainer": {"gpus": [0], "gpus_per_node": 2}}, "gpus_per_node = 2, but gpus lists 1"),
        ({"trainer": {"gpus": [0], "ranks_per_node": 2}}, "ranks_per_node = 2: must not exceed the 1 GPUs"),
        ({"trainer": {"gpus": [0, 1]}, "inference": {"gpus": [1, 2]}}, r"both have \[1\]"),
        ({"inference": {"tensor_parallel": 2}}, "tensor_parallel = 2: must divide gpus_per_replica = 0"),
        ({"inference": {"tensor_parallel": 2, "gpus_per_replica": 3}}, "must divide gpus_per_replica = 3"),
        ({"inference": {"replicas": 2, "gpus": [0, 1, 2]}}, "2 replicas need the same number"),
        ({"slurm": {}}, r'\[deployment.slurm\] with engine = "local": remove it, or set the engine'),
        ({"engine": "slurm", "ray": {}}, r'\[deployment.ray\] with engine = "slurm"'),
        ({"engine": "ray", "trainer": {"gpus": [0]}}, 'is for engine "local"'),
        ({"modules": {"cook": "x"}}, "modules.cook"),
    ],
)
def test_what_does_not_fit_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DeploymentConfig.model_validate(table)
