"""`prl deploy kubernetes`: manifests of a workspace, from the table [deployment]: a volume, a service, an indexed job.

The pods of the job form a Ray cluster. The first one runs the supervisor, which places the daemons on all of them as it
does on any Ray cluster; the volume is the workspace. No pod talks to the cluster's API.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer

from daemons.commands.common import FILE_AND_OPTIONS, Passing, say
from daemons.commands.lifecycle import choose_system
from daemons.errors import WrongUseError
from daemons.launchers.base import LaunchError, nodes_needed
from daemons.specs import service_specs
from prime_rl.configs.base import without_nulls
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir

deploy_app = typer.Typer(no_args_is_help=True, help="Write what other systems need to run a workspace.")
# Versions of Kubernetes before it have no `successPolicy`: their job would not end with its first pod.
NEEDED_VERSION = "1.31"
RAY_PORT = 6379
_CONFIG, _WORKSPACE, _KEYS = "/etc/prl", "/workspace", "/etc/prl-key"
# What a name of Kubernetes may be, with room for "-" and the number of a pod.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
# How often one pod is started again, for as long as the job lives.
_MAX_RESTARTS = 20


@dataclass(frozen=True)
class Pods:
    """The settings of the pods, which the system file does not say.

    `gpus`: of each pod; None for as many as its daemons need. `cpus`, `memory`, `storage`: as Kubernetes writes them.
    """

    image: str
    name: str = "prl"
    gpus: int | None = None
    cpus: str = "8"
    memory: str = "64Gi"
    storage: str = "500Gi"
    storage_class: str | None = None


def manifests(system: SystemConfig, pods: Pods) -> dict[str, dict[str, Any]]:
    """Kubernetes objects, by the names of their files. Raises LaunchError."""
    if not _NAME.fullmatch(pods.name):
        raise LaunchError(f"invalid name {pods.name!r}: at most 52 small letters, digits and -, a letter first")
    asked = on_ray(system)
    specs = service_specs(OutputDir(asked.output_dir), asked)
    num_pods = nodes_needed(specs, pods.gpus)
    gpus = pods.gpus or max(spec.gpus for spec in specs)
    limits = asked.supervisor
    grace_s = int(2 * limits.drain_s + 5 * limits.grace_s + 30)
    text = tomli_w.dumps(without_nulls(asked.model_dump(mode="json", exclude_unset=True)))
    # Names for the pods; also for those that are not ready, which is when Ray looks for its head.
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(pods)}
    return {
        "config.yaml": _object("v1", "ConfigMap", pods, {"data": {"system.toml": text}}),
        "volume.yaml": _object("v1", "PersistentVolumeClaim", pods, {"spec": _claim(pods)}),
        "service.yaml": _object("v1", "Service", pods, {"spec": service}),
        "job.yaml": _object("batch/v1", "Job", pods, {"spec": _job(pods, num_pods, gpus, grace_s)}),
    }


def on_ray(system: SystemConfig) -> SystemConfig:
    """The same system in its pods: the volume is the workspace, and Ray the engine."""
    data = system.model_dump(mode="json", exclude_unset=True)
    deployment = {key: value for key, value in data.get("deployment", {}).items() if key not in ("slurm", "ray")}
    for part, number in (("trainer", "gpus_per_node"), ("inference", "gpus_per_replica")):
        table = dict(deployment.get(part, {}))
        if gpus := table.pop("gpus", None):
            table.setdefault(number, len(gpus) // (table.get("replicas", 1) if part == "inference" else 1))
        deployment[part] = table
    place = {"output_dir": _WORKSPACE}
    parts = {part: {**data.get(part, {}), **place} for part in ("trainer", "inference")}
    return SystemConfig.model_validate({**data, **place, **parts, "deployment": {**deployment, "engine": "ray"}})


def start_script(pods: Pods, gpus: int) -> str:
    """The script that a pod runs, by sh. The first one is the head."""
    head = f"{pods.name}-0.{pods.name}:{RAY_PORT}"
    ray = f"ray start --disable-usage-stats --num-gpus={gpus}"
    up = shlex.join(["prl", "up", "--foreground", "@", f"{_CONFIG}/system.toml", "--output-dir", _WORKSPACE])
    return (
        "set -eu\n"
        f"[ ! -f {_KEYS}/key ] || export PRL_API_KEY_FILE={_KEYS}/key\n"
        'if [ "$JOB_COMPLETION_INDEX" = 0 ]; then\n'
        f"  {ray} --head --port={RAY_PORT} --include-dashboard=false\n"
        f"  exec {up}\n"
        "fi\n"
        f"until ray health-check --address {head}; do sleep 2; done\n"
        f"exec {ray} --address={head} --block\n"
    )


def _object(version: str, kind: str, pods: Pods, rest: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": pods.name, "labels": _labels(pods)}, **rest}


def _labels(pods: Pods) -> dict[str, str]:
    return {"app.kubernetes.io/name": "prl", "app.kubernetes.io/instance": pods.name}


def _claim(pods: Pods) -> dict[str, Any]:
    chosen = {"storageClassName": pods.storage_class} if pods.storage_class else {}
    return {"accessModes": ["ReadWriteMany"], **chosen, "resources": {"requests": {"storage": pods.storage}}}


def _job(pods: Pods, num_pods: int, gpus: int, grace_s: int) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "completions": num_pods,
        "parallelism": num_pods,
        "backoffLimitPerIndex": _MAX_RESTARTS,
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        # Wrong usage is not retried.
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"containerName": "prl", "operator": "In", "values": [2]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"metadata": {"labels": _labels(pods)}, "spec": _pod(pods, gpus, grace_s)},
    }


def _pod(pods: Pods, gpus: int, grace_s: int) -> dict[str, Any]:
    amounts = {"cpu": pods.cpus, "memory": pods.memory, **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    volumes: dict[str, tuple[str, dict[str, Any]]] = {
        "workspace": (_WORKSPACE, {"persistentVolumeClaim": {"claimName": pods.name}}),
        "config": (_CONFIG, {"configMap": {"name": pods.name}}),
        # kubectl create secret generic NAME-key --from-file=key=FILE; the workspace runs without it, too.
        "key": (_KEYS, {"secret": {"secretName": f"{pods.name}-key", "optional": True, "defaultMode": 0o400}}),
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}),
    }
    container = {
        "name": "prl",
        "image": pods.image,
        "command": ["sh", "-c", start_script(pods, gpus)],
        "env": [{"name": "PYTHONUNBUFFERED", "value": "1"}],
        "resources": {"requests": amounts, "limits": amounts},
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
    }
    return {
        "subdomain": pods.name,
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": grace_s,
        "containers": [container],
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
    }


@deploy_app.command(cls=Passing, options_metavar=FILE_AND_OPTIONS)
def kubernetes(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the manifests.")],
    image: Annotated[str, typer.Option(help="Container image with this project and Ray installed.")],
    name: Annotated[str, typer.Option(help="Name of the job, the service and the volume claim.")] = "prl",
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of each pod. Default: as many as needed.")] = None,
    cpus: Annotated[str, typer.Option(help="CPUs of each pod.")] = Pods.cpus,
    memory: Annotated[str, typer.Option(help="Memory of each pod.")] = Pods.memory,
    storage: Annotated[str, typer.Option(help="Size of the workspace's volume, which all pods share.")] = Pods.storage,
    storage_class: Annotated[
        str | None, typer.Option(help="Its storage class; must allow ReadWriteMany. Default: the cluster's.")
    ] = None,
) -> None:
    """Write Kubernetes manifests for a workspace.

    They are made from the table [deployment] of the system file: a job whose pods form a Ray cluster, a service, a
    volume claim, the settings. Starts nothing: kubectl apply -f DIR does.

    Example: prl deploy kubernetes @ system.toml --image registry/prl:1 --out k8s
    """
    import yaml

    if not any(word.startswith("@") for word in context.args):
        raise WrongUseError("missing @ FILE: the system file whose workspace is to be deployed")
    system = choose_system(context.args, None, say=lambda line: None).system
    pods = Pods(image, name, gpus, cpus, memory, storage, storage_class)
    files = manifests(system, pods)
    out.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        write_atomic(out / file, yaml.safe_dump(content, sort_keys=False))
    num_pods = files["job.yaml"]["spec"]["completions"]
    say(f"{out}: {', '.join(files)}; {num_pods} pods, Kubernetes {NEEDED_VERSION} or newer; kubectl apply -f {out}")
