"""When the slots of a workspace are counted again, and the trainer's ranks, for which they are counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

from daemons.slots import _gpus, settle_slots
from daemons.specs import UP, save_topology, write_component_configs
from prime_rl.configs.base import build, merge
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.layout import OutputDir

RANKS = {"PRL_MODULES": "trainer=daemons.torchrun"}


@pytest.mark.parametrize(
    ("environ", "gpus"),
    [
        ({}, "1"),
        ({"PRL_TORCHRUN": "--nproc-per-node 4"}, "1"),
        (RANKS, "all"),
        ({**RANKS, "PRL_TORCHRUN": "--standalone --nproc-per-node 4"}, "4"),
        ({**RANKS, "PRL_TORCHRUN": "--nnodes=2:4 --nproc_per_node=8"}, "16"),
        ({**RANKS, "PRL_TRAINER_GPUS": "0,1,2"}, "3"),
        ({**RANKS, "PRL_TORCHRUN": "--nnodes 2 --nproc-per-node gpu", "PRL_TRAINER_GPUS": "0,1"}, "4"),
        ({**RANKS, "PRL_TORCHRUN": "--nproc-per-node many"}, "all"),
    ],
)
def test_the_ranks_of_the_trainer_are_those_that_torchrun_starts(environ: dict[str, str], gpus: str) -> None:
    assert _gpus(environ) == gpus


SAID = {"max_concurrent_runs": "auto", "model": {"name": "models/somewhere/base"}}


def up_with(output: OutputDir, said: dict[str, object], num_slots: int, topology: dict[str, str]) -> None:
    """What an earlier `prl up` left."""
    write_component_configs(build(SystemConfig, said, "said").with_slots(num_slots), output)
    output.component_config(UP).write_text(tomli_w.dumps(said))
    save_topology(output, topology)


@pytest.mark.parametrize(
    ("now", "is_counted"),
    [
        ({}, False),
        ({"inference": {"port": 8001}, "supervisor": {"grace_s": 3}, "trainer": {"num_threads": 2}}, False),
        ({"max_concurrent_runs": 5}, False),
        ({"seq_len": 100}, True),
        ({"lora": {"rank": 32}}, True),
        ({"max_async_level": 3}, True),
        ({"trainer": {"max_tokens_per_micro_batch": "auto"}}, True),
        ({"inference": {"engine": "vllm"}}, True),
    ],
)
def test_the_slots_that_were_counted_hold_until_what_decides_them_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: dict[str, object], is_counted: bool
) -> None:
    monkeypatch.delenv("PRL_MODULES", raising=False)
    model = tmp_path / "base"
    model.mkdir()
    (model / "config.json").touch()
    said = merge(SAID, {"model": {"name": str(model)}})
    output = OutputDir(tmp_path)
    up_with(output, said, 7, {})
    system = build(SystemConfig, merge(said, now), "now")
    lines: list[str] = []
    # Counting would take seconds: it is stopped as soon as it begins.
    found = settle_slots(system, output, stop=lambda: True, say=lines.append)
    assert (found is None) is is_counted is any("counting" in line for line in lines)
    if found is not None:
        assert found.inference.max_concurrent_runs == now.get("max_concurrent_runs", 7)


def test_slots_are_counted_for_other_ranks_too_and_a_number_that_was_set_is_not_one_that_was_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").touch()
    said = merge(SAID, {"model": {"name": str(tmp_path)}})
    system, output = build(SystemConfig, said, "now"), OutputDir(tmp_path)
    monkeypatch.delenv("PRL_MODULES", raising=False)
    up_with(output, {**said, "max_concurrent_runs": 7}, 7, {})
    assert settle_slots(system, output, stop=lambda: True, say=print) is None
    up_with(output, said, 7, {**RANKS, "PRL_TORCHRUN": "--nproc-per-node 2"})
    assert settle_slots(system, output, stop=lambda: True, say=print) is not None, "what was saved still holds"
    monkeypatch.setenv("PRL_TORCHRUN", "--nproc-per-node 4")
    assert settle_slots(system, output, stop=lambda: True, say=print) is None
