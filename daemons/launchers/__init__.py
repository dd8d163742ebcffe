"""Engines that run daemons, each behind the `Launcher` protocol of `base`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from daemons.launchers.base import Launcher
    from prime_rl.configs.system import DeploymentConfig
    from prime_rl.contract.layout import OutputDir


def launcher_of(deployment: DeploymentConfig, output: OutputDir) -> Launcher:
    """The launcher of a workspace's engine; only that one is imported. Raises LaunchError."""
    if deployment.engine == "ray":
        from daemons.launchers.ray import RayLauncher

        ray = deployment.ray
        return RayLauncher(output, ray.address, ray.resources) if ray else RayLauncher(output)
    if deployment.engine == "slurm":
        from daemons.launchers.slurm import Allocation, Slurm

        return Slurm(output, Allocation.of(), deployment.slurm.gpus_per_node if deployment.slurm else None)
    from daemons.launchers.local import Local

    return Local(output)
