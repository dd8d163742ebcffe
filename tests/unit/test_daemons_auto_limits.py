"""When the slots of a workspace are counted again, the trainer's ranks, and vLLM's share of a GPU that both use."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import tomli_w

from daemons.auto_limits import _gpus, _numbers, settle_slots, share_a_gpu
from daemons.launch import LaunchError
from daemons.specs import UP, save_topology, write_component_configs
from prime_rl.configs.base import build, merge
from prime_rl.configs.deployment import TrainerDeployment
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
    assert _gpus(environ, TrainerDeployment()) == gpus
    several = TrainerDeployment(ranks_per_node=3)
    assert _gpus(environ, several) == (gpus if "PRL_MODULES" in environ else "3")


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


@pytest.fixture
def one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's tool lists a GPU; torch finds none, so `prl fit` assumes one of 80 GiB."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'GPU 0: A'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    for name in ("PRL_MODULES", "PRL_TORCHRUN", "PRL_TRAINER_GPUS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


VLLM = {"inference": {"engine": "vllm"}}


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("said", "environ", "is_shared"),
    [
        ({}, {}, True),
        ({}, RANKS, True),
        ({}, {"PRL_TRAINER_GPUS": "1"}, True),
        ({}, {**RANKS, "PRL_TRAINER_GPUS": "0,1"}, True),
        ({}, {**RANKS, "PRL_TRAINER_GPUS": "1,2"}, False),
        ({}, {**RANKS, "PRL_TRAINER_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "2,3"}, False),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, False),
        ({"trainer": {"device": "cpu"}}, {}, False),
        ({"inference": {"device": "cpu"}}, {}, False),
        ({"inference": {"engine": "embedded"}}, {}, False),
        ({"inference": {"vllm": {"gpu_memory_utilization": 0.5}}}, {}, False),
        ({"inference": {"vllm": {"extra_args": {"data_parallel_size": 2}}}}, {}, False),
    ],
)
def test_trainer_and_vllm_share_a_gpu_unless_they_are_told_apart(
    said: dict[str, object], environ: dict[str, str], is_shared: bool
) -> None:
    assert share_a_gpu(build(SystemConfig, merge(VLLM, said), "said"), environ) is is_shared


def test_without_a_gpu_nothing_is_shared() -> None:
    if subprocess.run(["sh", "-c", "command -v nvidia-smi"], capture_output=True).returncode == 0:
        pytest.skip("this machine has the driver's tool")
    assert not share_a_gpu(build(SystemConfig, VLLM, "said"), {})


SHAPE = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.mark.usefixtures("one_gpu")
def test_vllm_gets_what_the_trainer_leaves_of_the_gpu(tmp_path: Path) -> None:
    shape = {**SHAPE, "hidden_size": 4096, "intermediate_size": 65_536, "vocab_size": 32_000}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    trainer = {"max_tokens_per_micro_batch": 65_536}
    said = {**VLLM, "trainer": trainer, "model": {"name": str(tmp_path)}, "max_concurrent_runs": 3}
    output, lines = OutputDir(tmp_path / "workspace"), list[str]()
    system = build(SystemConfig, said, "said")
    found = settle_slots(system, output, stop=lambda: False, say=lines.append)
    assert found is not None and found.max_concurrent_runs == 3
    share = found.inference.vllm.gpu_memory_utilization
    assert isinstance(share, float) and 0.3 < share < 0.9, "the activations of such a pass are many"
    assert (
        lines[-1]
        == f"inference.vllm.gpu_memory_utilization = 'auto': {share:g} of the GPU that trainer and inference share"
    )
    write_component_configs(found, output)
    output.component_config(UP).write_text(tomli_w.dumps(said))
    save_topology(output, {})
    assert settle_slots(system, output, stop=lambda: True, say=lines.append) == found, "it holds"
    other = build(SystemConfig, {**said, "max_concurrent_runs": 4}, "other")
    assert settle_slots(other, output, stop=lambda: True, say=lines.append) is None, "it is worked out again"


def test_what_does_not_fit_onto_one_gpu_is_refused_with_the_numbers() -> None:
    sizes = {"tokens": 8192, "runs": 4, "peak_gib": 61.25, "usable_gib": 75.0, "weights_gib": 15.3}
    with pytest.raises(LaunchError, match=r"8192 tokens with 4 slots takes 61\.2 of 75\.0 GiB.* 15\.3 GiB of weights"):
        _numbers({**sizes, "gpu_memory_utilization": None}, True)
    assert _numbers({**sizes, "gpu_memory_utilization": None}, False)["max_concurrent_runs"] == 4
    assert _numbers({**sizes, "gpu_memory_utilization": 0.97}, True)["inference.vllm.gpu_memory_utilization"] == 0.9
