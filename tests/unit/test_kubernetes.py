"""The manifests for Kubernetes: right by its own schemas, and the same workspace as the system file describes."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemons.cli import run
from daemons.commands.deploy import NEEDED_VERSION, Pods, manifests, on_ray, start_script
from daemons.launchers.base import LaunchError
from daemons.specs import service_specs
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.layout import OutputDir

PODS = Pods("registry/prl:1", name="main")


def system(trainer: dict[str, Any] | None = None, inference: dict[str, Any] | None = None, **more: Any) -> SystemConfig:
    deployment = {"trainer": trainer or {}, "inference": inference or {}, **more}
    return SystemConfig.model_validate({"model": {"name": "m"}, "seq_len": 512, "deployment": deployment})


@pytest.mark.parametrize(
    ("nodes", "replicas", "num_pods"), [(1, 1, 2), (4, 4, 5), (128, 32, 136)], ids=["1x8", "4x8", "128x8"]
)
@pytest.mark.parametrize("version", [NEEDED_VERSION, "1.34"])
def test_kubernetes_takes_them(nodes: int, replicas: int, num_pods: int, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    asked = system({"nodes": nodes, "gpus_per_node": 8}, {"replicas": replicas, "gpus_per_replica": 2}, engine="ray")
    found = manifests(asked, Pods("i", gpus=8, storage_class="fast"))
    for content in found.values():
        validate.validate(content, version, strict=True)
        assert yaml.safe_load(yaml.safe_dump(content)) == content
    job = found["job.yaml"]["spec"]
    assert (job["completions"], job["parallelism"]) == (num_pods, num_pods)
    container = job["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    with pytest.raises(validate.ValidationError):
        validate.validate({**found["job.yaml"], "spec": {**job, "paralellism": 1}}, version, strict=True)


def test_names_and_volumes_fit_together() -> None:
    found = manifests(system(), PODS)
    pod = found["job.yaml"]["spec"]["template"]
    assert pod["spec"]["subdomain"] == found["service.yaml"]["metadata"]["name"] == "main"
    selector = found["service.yaml"]["spec"]["selector"]
    assert selector.items() <= pod["metadata"]["labels"].items()
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    mounts = {each["name"]: each["mountPath"] for each in pod["spec"]["containers"][0]["volumeMounts"]}
    assert volumes.keys() == mounts.keys()
    assert volumes["workspace"]["persistentVolumeClaim"]["claimName"] == found["volume.yaml"]["metadata"]["name"]
    assert volumes["config"]["configMap"]["name"] == found["config.yaml"]["metadata"]["name"]
    assert "resources" in found["volume.yaml"]["spec"] and "nvidia.com/gpu" not in str(found)
    inside = SystemConfig.model_validate(tomllib.loads(found["config.yaml"]["data"]["system.toml"]))
    assert str(inside.output_dir) == mounts["workspace"] and inside.seq_len == 512
    limits = inside.supervisor
    assert pod["spec"]["terminationGracePeriodSeconds"] > 2 * limits.drain_s + 5 * limits.grace_s


def test_pods_start_as_a_cluster_that_a_workspace_can_use(tmp_path: Path) -> None:
    for name in ("ray", "prl"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        program.chmod(0o755)

    def said(index: int) -> list[str]:
        environ = {"JOB_COMPLETION_INDEX": str(index), "PATH": f"{tmp_path}:/usr/bin:/bin"}
        command = ["sh", "-c", start_script(PODS, 8)]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.splitlines()

    assert said(0) == [
        "ray start --disable-usage-stats --num-gpus=8 --head --port=6379 --include-dashboard=false",
        "prl up --foreground @ /etc/prl/system.toml --output-dir /workspace",
    ]
    assert said(3) == [
        "ray health-check --address main-0.main:6379",
        "ray start --disable-usage-stats --num-gpus=8 --address=main-0.main:6379 --block",
    ]


def test_the_daemons_are_those_of_the_system_file_whatever_its_engine() -> None:
    one_machine = system({"gpus": [0, 1, 2, 3]}, {"replicas": 2, "gpus": [4, 5, 6, 7]})
    found = {spec.name: spec for spec in service_specs(OutputDir(Path("/workspace")), on_ray(one_machine))}
    assert (found["trainer"].gpus, found["trainer"].ranks, found["trainer"].devices) == (4, 4, ())
    assert (found["inference"].gpus, found["inference-1"].gpus) == (2, 2)
    slurm = system({"nodes": 2, "gpus_per_node": 8}, engine="slurm", slurm={"partition": "p"})
    moved = on_ray(slurm)
    assert moved.deployment.engine == "ray" and moved.deployment.slurm is None and moved.deployment.trainer.nodes == 2


@pytest.mark.parametrize("name", ["", "Main", "a_b", "-a", "a" * 60, "1a"])
def test_a_name_that_kubernetes_would_refuse_is_refused(name: str) -> None:
    with pytest.raises(LaunchError, match="invalid name"):
        manifests(system(), Pods("i", name=name))


def test_the_command_writes_files_and_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "system.toml"
    file.write_text('[model]\nname = "m"\n[deployment.trainer]\nranks_per_node = 2\n')
    words = ["deploy", "kubernetes", "@", str(file), "--image", "i", "--out", str(tmp_path / "k8s")]
    assert run(words) == 0
    assert "1 pods" in capsys.readouterr().out
    kinds = {yaml.safe_load(path.read_text())["kind"] for path in (tmp_path / "k8s").iterdir()}
    assert kinds == {"ConfigMap", "PersistentVolumeClaim", "Service", "Job"}
    assert run([*words, "--gpus", "1", "--deployment.trainer.gpus_per_node", "2"]) == 1
    assert "needs 2 GPUs of one node, which has 1" in capsys.readouterr().err
    assert run(["deploy", "kubernetes", "--image", "i", "--out", str(tmp_path)]) == 2
    assert "missing @ FILE" in capsys.readouterr().err
