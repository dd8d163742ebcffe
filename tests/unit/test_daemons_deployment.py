"""What the table [deployment] makes of daemons: commands, GPUs, ranks, several inference servers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemons.alerts.__main__ import is_well
from daemons.decide import Daemon, State
from daemons.launchers.base import LaunchError
from daemons.launchers.local import Local
from daemons.records import adoptable
from daemons.specs import (
    INFERENCE,
    TRAINER,
    DaemonSpec,
    keys_of,
    monitors_spec,
    orchestrator_spec,
    save_devices,
    saved_devices,
    saved_system,
    service_specs,
    wanted_daemons,
    write_component_configs,
)
from daemons.submit import plan_of
from daemons.supervisor import shutdown_order
from daemons.supervisor_process import prepare
from daemons.workspace import DaemonView, Workspace
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.utils.process import ProcessId
from prime_rl.utils.text import one_line
from tests.unit.test_daemons_holder import record


@pytest.fixture
def output(tmp_path: Path) -> OutputDir:
    return OutputDir(tmp_path / "workspace")


@pytest.fixture
def alive() -> Iterator[ProcessId]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as child:
        yield ProcessId.of(child.pid)
        child.kill()


def up(output: OutputDir, deployment: dict[str, Any] | None = None, **settings: Any) -> SystemConfig:
    """The settings of a `prl up`, saved."""
    system = SystemConfig.model_validate({"output_dir": output.path, "deployment": deployment or {}, **settings})
    write_component_configs(system, output)
    return system


def specs(output: OutputDir) -> dict[str, DaemonSpec]:
    return {spec.name: spec for spec in service_specs(output)}


def test_without_the_table_each_is_one_process(output: OutputDir) -> None:
    for _ in range(2):
        found = specs(output)
        assert list(found) == [INFERENCE, TRAINER]
        config = str(output.component_config(TRAINER))
        assert found[TRAINER].argv == (sys.executable, "-m", "prime_rl.trainer.train", "@", config)
        up(output)  # the same before the first start


def test_ranks_are_those_of_torchrun(output: OutputDir) -> None:
    up(output, {"trainer": {"gpus": [0, 1, 3]}})
    spec = specs(output)[TRAINER]
    config = str(output.component_config(TRAINER))
    assert spec.argv == (
        *("env", "CUDA_VISIBLE_DEVICES=0,1,3", "env", "TORCH_CPP_LOG_LEVEL=ERROR"),
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"),
        *("-m", "prime_rl.trainer.train", "@", config),
    )
    assert (spec.num_nodes, spec.ranks, spec.devices) == (1, 3, (0, 1, 3))
    up(output, {"engine": "slurm", "trainer": {"nodes": 4, "min_nodes": 2, "gpus_per_node": 8}})
    spec = specs(output)[TRAINER]
    assert "--standalone" in spec.argv and (spec.num_nodes, spec.min_nodes, spec.gpus, spec.ranks) == (4, 2, 8, 8)


def test_each_inference_server_has_its_number_port_and_gpus(output: OutputDir) -> None:
    table = {"replicas": 2, "gpus": [4, 5, 6, 7], "tensor_parallel": 2}
    up(output, {"inference": table}, inference={"engine": "vllm", "port": 8000})
    first, second = specs(output)[INFERENCE], specs(output)["inference-1"]
    assert (first.kind, second.kind) == (INFERENCE, INFERENCE) and (first.replica, second.replica) == (0, 1)
    assert first.argv[:2] == ("env", "CUDA_VISIBLE_DEVICES=4,5") and "--replica" not in first.argv
    assert second.argv[:2] == ("env", "CUDA_VISIBLE_DEVICES=6,7")
    parallel = ("--vllm.extra_args.tensor_parallel_size", "2")
    assert first.argv[-2:] == parallel
    assert second.argv[-6:] == ("--replica", "1", "--port", "8001", *parallel)
    assert keys_of(first, output) == keys_of(second, output) == ["PRL_API_KEY"]
    up(output, {"inference": {"replicas": 2}}, inference={"port": 0})
    assert specs(output)["inference-1"].argv[-1] == "0"


@pytest.mark.parametrize(
    ("visible", "trainer", "inference"),
    [
        (None, "0", "1"),
        ("2,3", "2", "3"),
        ("GPU-a,GPU-b", "GPU-a", "GPU-b"),
        ("MIG-1,MIG-2,MIG-3", "MIG-1", "MIG-2"),
    ],
)
def test_gpus_are_counted_among_those_that_the_shell_of_up_gives(
    output: OutputDir, visible: str | None, trainer: str, inference: str
) -> None:
    """Of an allocation of GPUs 2 and 3 the first is 2; parts of a card and UUIDs can be meant too."""
    up(output, {"trainer": {"gpus": [0]}, "inference": {"gpus": [1]}})
    save_devices(output, visible)
    found = specs(output)
    assert found[TRAINER].argv[:2] == ("env", f"CUDA_VISIBLE_DEVICES={trainer}")
    assert found[INFERENCE].argv[:2] == ("env", f"CUDA_VISIBLE_DEVICES={inference}")


@pytest.mark.parametrize(
    ("deployment", "visible", "told"),
    [
        ({"trainer": {"gpus": [0, 2]}}, "2,3", r"trainer.gpus = \[0, 2\]: .*=2,3 has 2 GPUs, .* from 0; remove \[2\]"),
        ({"inference": {"gpus": [1]}}, "GPU-a", r"inference.gpus = \[1\]: .*=GPU-a has 1 GPU,"),
        ({"trainer": {"gpus": [0]}}, "", r"trainer.gpus = \[0\]: .*= has 0 GPUs,"),
    ],
)
def test_a_gpu_that_the_shell_of_up_does_not_see_is_refused(
    output: OutputDir, deployment: dict[str, Any], visible: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be another one's, or one twice."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    system = SystemConfig.model_validate({"output_dir": output.path, "deployment": deployment})
    with pytest.raises(LaunchError, match=told):
        prepare(system, output, print)
    assert saved_devices(output) is None


def test_a_dry_run_shows_the_gpus_of_a_start_from_this_shell(
    output: OutputDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = up(output, {"trainer": {"gpus": [0]}})
    save_devices(output, "6,7")
    for shell, gpu in (("2,3", "2"), (None, "6")):
        if shell is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shell)
        (trainer,) = [each for each in plan_of(system, output).daemons if each.name == TRAINER]
        assert trainer.command[:2] == ("env", f"CUDA_VISIBLE_DEVICES={gpu}")


def test_modules_stand_in(output: OutputDir) -> None:
    modules = {"trainer": "my.trainer", "inference": "my.server", "orchestrator": "my.loop", "monitors": "my.eyes"}
    up(output, {"modules": modules, "trainer": {"ranks_per_node": 2}})
    found = specs(output)
    assert "my.trainer" in found[TRAINER].argv and "torch.distributed.run" in found[TRAINER].argv
    assert "my.server" in found[INFERENCE].argv
    assert "my.loop" in orchestrator_spec(RunDir(output.path / "run_a")).argv
    assert "my.eyes" in monitors_spec(output).argv


def test_a_change_of_the_saved_settings_is_seen(output: OutputDir) -> None:
    up(output)
    assert set(wanted_daemons(output, [])) == {INFERENCE, TRAINER}
    before = saved_system(output)
    assert saved_system(output) is before, "not read again"
    up(output, {"inference": {"replicas": 3}})
    assert set(wanted_daemons(output, [])) == {INFERENCE, "inference-1", "inference-2", TRAINER}


def test_only_what_the_table_changes_is_started_anew(output: OutputDir, alive: ProcessId) -> None:
    two = {"replicas": 2, "gpus": [0, 1]}
    up(output, {"inference": two})
    for name in (INFERENCE, "inference-1", TRAINER):
        record(output, name, alive)

    def kept(deployment: dict[str, Any], **settings: Any) -> set[str]:
        data = {"output_dir": output.path, "deployment": deployment, **settings}
        return adoptable(output, Local(output), SystemConfig.model_validate(data))

    assert kept({"inference": two}) == {INFERENCE, "inference-1", TRAINER}
    assert kept({"inference": two, "trainer": {"gpus": [2]}}) == {INFERENCE, "inference-1"}
    assert kept({"inference": {"replicas": 2, "gpus": [0, 3]}}) == {INFERENCE, TRAINER}
    assert kept({"inference": {"gpus": [0]}}) == {INFERENCE, TRAINER}
    assert kept({"inference": two}, inference={"num_threads": 3}) == {TRAINER}, "the config of both servers"


def test_all_servers_end_last(output: OutputDir) -> None:
    up(output, {"inference": {"replicas": 2}})
    daemons = [Daemon(spec, State.RUNNING) for spec in service_specs(output)]
    groups = [[daemon.spec.name for daemon in group] for group in shutdown_order(daemons)]
    assert groups == [[TRAINER], [INFERENCE, "inference-1"]]


def test_all_is_well_only_with_every_server(output: OutputDir) -> None:
    def view(name: str, state: str = "running") -> DaemonView:
        return DaemonView(one_line(name), one_line(state), 1, None, None, (), 0.0, 0)

    well = [view("supervisor"), view(TRAINER), view(INFERENCE)]

    def look(*more: DaemonView) -> Workspace:
        blank: Any = None
        return Workspace(output.path, (), (), (*well, *more), 0, 0, blank, blank, True, blank, 0.0)

    assert is_well(look()) and is_well(look(view("inference-1")))
    assert not is_well(look(view("inference-1", "backoff")))
    assert is_well(look(view("inference-1", "done"))), "it was scaled away"
    assert not is_well(replace(look(), supervisor_alive=False))
