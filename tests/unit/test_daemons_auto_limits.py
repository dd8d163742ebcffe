"""When the slots of a workspace are counted again, the trainer's ranks, and the shares of a GPU that two use."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import tomli_w

from daemons.commands.lifecycle import scale_inference
from daemons.launchers.base import LaunchError
from daemons.specs import FIT_MODULE, UP, save_devices, write_component_configs
from daemons.up_and_down import _numbers, settle_slots, share_a_gpu
from daemons.workspace import SUPERVISOR
from prime_rl.configs.base import build, load_config, merge
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import DaemonStatus, StatusWriter
from prime_rl.trainer.fit import main as fit
from tests.budgets import in_full
from tests.daemons_support import ROOT, in_this_process

SAID = {"max_concurrent_runs": "auto", "model": {"name": "models/somewhere/base"}}


def up_with(output: OutputDir, said: dict[str, object], num_slots: int, devices: str | None = None) -> None:
    """What an earlier `prl up` left."""
    write_component_configs(build(SystemConfig, said, "said").with_slots(num_slots), output)
    output.component_config(UP).write_text(tomli_w.dumps(said))
    save_devices(output, devices)


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
        ({"deployment": {"trainer": {"ranks_per_node": 2}}}, True),
        ({"deployment": {"trainer": {"gpus": [0]}}}, True),
        ({"deployment": {"inference": {"replicas": 2}}}, False),
    ],
)
def test_the_slots_that_were_counted_hold_until_what_decides_them_changes(
    tmp_path: Path, now: dict[str, object], is_counted: bool
) -> None:
    model = tmp_path / "base"
    model.mkdir()
    (model / "config.json").touch()
    said = merge(SAID, {"model": {"name": str(model)}})
    output = OutputDir(tmp_path)
    up_with(output, said, 7)
    system = build(SystemConfig, merge(said, now), "now")
    lines: list[str] = []
    # Counting would take seconds: it is stopped as soon as it begins.
    found = settle_slots(system, output, stop=lambda: True, say=lines.append)
    assert (found is None) is is_counted is any("counting" in line for line in lines)
    if found is not None:
        assert found.inference.max_concurrent_runs == now.get("max_concurrent_runs", 7)


def test_slots_are_counted_for_other_devices_too_and_a_number_that_was_set_is_not_one_that_was_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").touch()
    said = merge(SAID, {"model": {"name": str(tmp_path)}})
    system, output = build(SystemConfig, said, "now"), OutputDir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    up_with(output, {**said, "max_concurrent_runs": 7}, 7)
    assert settle_slots(system, output, stop=lambda: True, say=print) is None
    up_with(output, said, 7, "0,1")
    assert settle_slots(system, output, stop=lambda: True, say=print) is not None, "what was saved still holds"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert settle_slots(system, output, stop=lambda: True, say=print) is None


@pytest.fixture
def some_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's tool lists GPUs; torch finds none, so `prl fit` assumes one of 80 GiB."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\nfor n in 0 1 2 3; do echo "GPU $n: A"; done\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


VLLM = {"inference": {"engine": "vllm"}}


@pytest.mark.usefixtures("some_gpus")
@pytest.mark.parametrize(
    ("said", "devices", "is_shared"),
    [
        ({}, None, True),
        ({"deployment": {"trainer": {"gpus": [0, 1]}}}, None, True),
        ({"deployment": {"trainer": {"gpus": [1, 2]}}}, None, False),
        ({"deployment": {"trainer": {"gpus": [0, 1]}}}, "2,3", True),
        ({"deployment": {"trainer": {"gpus": [1]}}}, "2,3", False),
        ({"deployment": {"trainer": {"gpus": [0]}}}, "GPU-a,GPU-b", True),
        ({"deployment": {"trainer": {"gpus": [1]}}}, "GPU-a,GPU-b", False),
        ({"deployment": {"trainer": {"gpus": [0]}, "inference": {"gpus": [1]}}}, None, False),
        ({"deployment": {"inference": {"gpus": [1]}}}, None, False),
        ({"deployment": {"inference": {"gpus": [0]}}}, None, True),
        ({"deployment": {"trainer": {"ranks_per_node": 2}, "inference": {"gpus": [1]}}}, None, True),
        ({"deployment": {"engine": "slurm", "trainer": {"gpus_per_node": 4}}}, None, False),
        ({"deployment": {"engine": "ray", "inference": {"gpus_per_replica": 1}}}, None, False),
        ({"deployment": {"engine": "slurm"}}, None, True),
        ({}, "", False),
        ({"trainer": {"device": "cpu"}}, None, False),
        ({"inference": {"device": "cpu"}}, None, False),
        ({"inference": {"engine": "embedded"}}, None, True),
        ({"inference": {"engine": "embedded", "embedded": {"gpu_share": 0.5}}}, None, False),
        ({"inference": {"vllm": {"gpu_memory_utilization": 0.5}}}, None, False),
        ({"inference": {"vllm": {"extra_args": {"data_parallel_size": 2}}}}, None, False),
    ],
)
def test_trainer_and_inference_share_a_gpu_unless_they_are_told_apart(
    said: dict[str, object], devices: str | None, is_shared: bool
) -> None:
    assert share_a_gpu(build(SystemConfig, merge(VLLM, said), "said"), devices) is is_shared


@pytest.mark.usefixtures("some_gpus")
@pytest.mark.parametrize(("recipe", "is_shared"), [("qwen3-0.6b-gsm8k", True), ("qwen3-4b-math", False)])
def test_a_recipe_for_one_gpu_leaves_the_share_to_prl_up(recipe: str, is_shared: bool) -> None:
    system = load_config(SystemConfig, ROOT / "configs" / "recipes" / recipe / "system.toml")
    assert share_a_gpu(system, None) is is_shared


def test_without_a_gpu_nothing_is_shared() -> None:
    if subprocess.run(["sh", "-c", "command -v nvidia-smi"], capture_output=True, check=False).returncode == 0:
        pytest.skip("this machine has the driver's tool")
    assert not share_a_gpu(build(SystemConfig, VLLM, "said"), None)


SHAPE = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.mark.usefixtures("some_gpus")
@pytest.mark.parametrize(("engine", "is_a_process"), [("vllm", False), *in_full(("embedded", False), ("vllm", True))])
def test_inference_gets_what_the_trainer_leaves_of_the_gpu_and_the_trainer_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, is_a_process: bool
) -> None:
    if not is_a_process:
        monkeypatch.setattr("daemons.up_and_down.run_child", in_this_process(FIT_MODULE, fit))
    shape = {**SHAPE, "hidden_size": 4096, "intermediate_size": 65_536, "vocab_size": 32_000}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    trainer = {"max_tokens_per_micro_batch": 65_536}
    said = {
        "inference": {"engine": engine},
        "trainer": trainer,
        "model": {"name": str(tmp_path)},
        "max_concurrent_runs": 3,
    }
    output, lines = OutputDir(tmp_path / "workspace"), list[str]()
    system = build(SystemConfig, said, "said")
    found = settle_slots(system, output, stop=lambda: False, say=lines.append)
    assert found is not None and found.max_concurrent_runs == 3
    share, key = found.inference.gpu_share, found.inference.share_key
    assert 0.3 < share < 0.9, "the activations of such a pass are many"
    assert found.trainer.gpu_share == pytest.approx(1.0 - share)
    assert lines[-1] == f"{key} = 'auto': {share:g} of the GPU that trainer and inference share"
    write_component_configs(found, output)
    output.component_config(UP).write_text(tomli_w.dumps(said))
    save_devices(output, None)
    assert settle_slots(system, output, stop=lambda: True, say=lines.append) == found, "it holds"
    other = build(SystemConfig, {**said, "max_concurrent_runs": 4}, "other")
    assert settle_slots(other, output, stop=lambda: True, say=lines.append) is None, "it is worked out again"


def test_a_share_that_a_person_gave_the_trainer_stays() -> None:
    system = build(SystemConfig, {"trainer": {"gpu_share": 0.25}}, "said").with_gpu_share(0.5)
    assert (system.inference.gpu_share, system.trainer.gpu_share) == (0.5, 0.25)


@pytest.mark.usefixtures("some_gpus")
@pytest.mark.parametrize(
    ("said", "share"),
    [
        ({}, 0.9),
        ({"deployment": {"inference": {"gpus": [1, 2]}}}, 0.9),
        ({"deployment": {"engine": "local"}}, 0.45),
        ({"inference": {"embedded": {"gpu_share": 0.3}}}, 0.3),
        ({"inference": {"device": "cpu"}}, 0.9),
    ],
    ids=str,
)
def test_servers_on_one_gpu_divide_it(tmp_path: Path, said: dict[str, object], share: float) -> None:
    replicas = 2 if said else 1
    apart = {"trainer": {"device": "cpu"}, "deployment": {"inference": {"replicas": replicas}}}
    system = build(SystemConfig, merge(apart, said), "said")
    found = settle_slots(system, OutputDir(tmp_path), stop=lambda: True, say=lambda _: None)
    assert found is not None and found.inference.gpu_share == share


@pytest.mark.usefixtures("some_gpus")
def test_servers_that_would_take_more_than_their_gpu_are_refused(tmp_path: Path) -> None:
    said = {
        "trainer": {"device": "cpu"},
        "inference": {"embedded": {"gpu_share": 0.6}},
        "deployment": {"inference": {"replicas": 2}},
    }
    system = build(SystemConfig, said, "said")
    with pytest.raises(LaunchError, match=r"^2 servers on one GPU, each with inference\.embedded\.gpu_share = 0\.6"):
        settle_slots(system, OutputDir(tmp_path), stop=lambda: True, say=lambda _: None)


@pytest.mark.usefixtures("some_gpus")
@pytest.mark.parametrize(("share", "gpus", "is_refused"), [(0.3, [], True), (0.2, [], False), (0.3, [1, 2], False)])
def test_no_server_is_added_on_a_gpu_that_has_no_room_while_a_workspace_is_up(
    tmp_path: Path, share: float, gpus: list[int], is_refused: bool
) -> None:
    output = OutputDir(tmp_path)
    deployed = {"gpus": gpus, "gpus_per_replica": 1} if gpus else {}
    said = merge(SAID, {"deployment": {"inference": deployed}, "output_dir": str(tmp_path)})
    system = build(SystemConfig, said, "said").with_slots(2).with_gpu_share(share)
    trainer = system.trainer.model_copy(update={"gpu_share": 0.6})
    write_component_configs(system.model_copy(update={"trainer": trainer}), output)
    output.component_config(UP).write_text(tomli_w.dumps(said))
    supervisor = StatusWriter(output.daemon_status(SUPERVISOR), DaemonStatus(name=SUPERVISOR))
    if is_refused:
        with pytest.raises(LaunchError, match=r"^2 servers on one GPU, each with .* = 0\.3, take more than is left"):
            scale_inference(tmp_path, 2)
    else:
        assert scale_inference(tmp_path, 2) == 1
    supervisor.close(state="stopped")
    assert scale_inference(tmp_path, 2) == (1 if is_refused else 2), "the next prl up divides the GPU again"


def test_a_trainer_beside_several_servers_waits_for_all_and_has_the_rest() -> None:
    system = build(SystemConfig, {"deployment": {"inference": {"replicas": 3}}}, "said").with_gpu_share(0.25)
    assert (system.inference.gpu_share, system.trainer.gpu_share, system.trainer.servers_on_gpu) == (0.25, 0.25, 3)
    assert _numbers({"runs": 4, "gpu_memory_utilization": 0.4}, "share", 3)["share"] == 0.3


def test_what_does_not_fit_onto_some_gpus_is_refused_with_the_numbers() -> None:
    sizes = {"tokens": 8192, "runs": 4, "peak_gib": 61.25, "usable_gib": 75.0, "weights_gib": 15.3}
    with pytest.raises(LaunchError, match=r"8192 tokens with 4 slots takes 61\.2 of 75\.0 GiB.* 15\.3 GiB of weights"):
        _numbers({**sizes, "gpu_memory_utilization": None}, "share")
    assert _numbers({**sizes, "gpu_memory_utilization": None}, None)["max_concurrent_runs"] == 4
    assert _numbers({**sizes, "gpu_memory_utilization": 0.97}, "share")["share"] == 0.9
