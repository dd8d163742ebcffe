"""`prl deploy kubernetes`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from daemons.commands.common import EXTRA, FILE_AND_OPTIONS, UsageError, say
from daemons.commands.up import choose_system, ignore
from daemons.kubernetes import NEEDED_VERSION, Pods, manifests
from prime_rl.contract.files import write_atomic

deploy_app = typer.Typer(no_args_is_help=True, help="Write what other systems need to run a workspace.")


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
        raise UsageError("missing @ FILE: the system file whose workspace is to be deployed")
    system = choose_system(context.args, None, say=ignore).system
    pods = Pods(image, name, gpus, cpus, memory, storage, storage_class)
    files = manifests(system, pods)
    out.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        write_atomic(out / file, yaml.safe_dump(content, sort_keys=False))
    num_pods = files["job.yaml"]["spec"]["completions"]
    say(f"{out}: {', '.join(files)}; {num_pods} pods, Kubernetes {NEEDED_VERSION} or newer; kubectl apply -f {out}")


def register(app: typer.Typer) -> None:
    """Add the group `prl deploy`."""
    deploy_app.command("kubernetes", context_settings=EXTRA, options_metavar=FILE_AND_OPTIONS)(kubernetes)
    app.add_typer(deploy_app, name="deploy")
