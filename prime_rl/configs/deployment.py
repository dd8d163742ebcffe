"""Where the daemons of a workspace run, and on how many machines and GPUs: the table `[deployment]` of a system file.

The engine decides which settings apply: numbers of GPUs of this machine (`gpus`) with "local" only, several nodes with
"slurm" and "ray" only. It starts nothing.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.base import BaseConfig

Engine = Literal["local", "slurm", "ray"]
Gpu = Annotated[int, Field(ge=0)]
MOST_NODES = 4096
# Programs that may stand in for a daemon's own.
DaemonKind = Literal["trainer", "inference", "orchestrator", "alerts", "monitors"]


def _check_numbers(gpus: list[int]) -> None:
    if len(set(gpus)) != len(gpus):
        raise ValueError(f"gpus = {gpus}: each number must occur once")


class TrainerDeployment(BaseConfig):
    """Machines, processes and GPUs of the trainer."""

    nodes: int = Field(1, ge=1, le=MOST_NODES)
    """Machines. More than 1 with engine "slurm" or "ray" only."""

    min_nodes: int = Field(1, ge=1, le=MOST_NODES)
    """The trainer restarts on the machines that are left while there are at least so many."""

    gpus_per_node: int = Field(0, ge=0)
    """GPUs of each machine."""

    ranks_per_node: int | None = Field(None, ge=1)
    """Processes on each machine. Default: one for each GPU, or 1 without GPUs."""

    gpus: list[Gpu] = Field(default_factory=list)
    """Numbers of this machine's GPUs, for engine "local". Empty: the GPUs that the shell of `prl up` sees."""

    @property
    def ranks(self) -> int:
        """Processes on each machine."""
        return self.ranks_per_node or self.gpus_per_node or len(self.gpus) or 1

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.min_nodes > self.nodes:
            raise ValueError(f"min_nodes = {self.min_nodes}: must not exceed nodes = {self.nodes}")
        _check_numbers(self.gpus)
        gpus = self.gpus_per_node or len(self.gpus)
        if self.gpus and self.gpus_per_node not in (0, len(self.gpus)):
            raise ValueError(
                f"gpus_per_node = {self.gpus_per_node}, but gpus lists {len(self.gpus)}: remove one of them"
            )
        if gpus and self.ranks > gpus:
            raise ValueError(f"ranks_per_node = {self.ranks}: must not exceed the {gpus} GPUs of a node")
        return self


class InferenceDeployment(BaseConfig):
    """Inference servers and their GPUs."""

    replicas: int = Field(1, ge=1)
    """Inference servers."""

    gpus_per_replica: int = Field(0, ge=0)
    """GPUs of each server."""

    tensor_parallel: int = Field(1, ge=1)
    """GPUs that hold one copy of the model; must divide `gpus_per_replica`."""

    gpus: list[Gpu] = Field(default_factory=list)
    """Numbers of this machine's GPUs, for engine "local", divided among the replicas in this order."""

    @property
    def gpus_each(self) -> int:
        """GPUs of one server, 0 for what it sees."""
        return self.gpus_per_replica or len(self.gpus) // self.replicas

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_numbers(self.gpus)
        each = self.gpus_per_replica
        if self.gpus and (each * self.replicas > len(self.gpus) if each else len(self.gpus) % self.replicas):
            asked = f"{each} GPUs each" if each else "the same number of GPUs each"
            raise ValueError(f"gpus lists {len(self.gpus)} GPUs: {self.replicas} replicas need {asked}")
        if self.tensor_parallel > 1 and (not self.gpus_each or self.gpus_each % self.tensor_parallel):
            raise ValueError(
                f"tensor_parallel = {self.tensor_parallel}: must divide gpus_per_replica = {self.gpus_each}"
            )
        return self

    def devices(self, replica: int) -> tuple[int, ...]:
        """The numbers of the GPUs of one server, () for those that it sees."""
        return tuple(self.gpus[replica * self.gpus_each : (replica + 1) * self.gpus_each])


class SlurmConfig(BaseConfig):
    """The way to submit the job."""

    partition: str | None = None
    """Partition of the job. Default: the cluster's."""

    account: str | None = None
    """Account that is charged. Default: the user's."""

    time: str | None = None
    """Time limit in Slurm's format, for example "12:00:00". Default: the partition's."""

    constraint: str | None = None
    """Features that the nodes must have."""

    nodes: int | None = Field(None, ge=1, le=MOST_NODES)
    """Nodes of the job. Default: those of the trainer, and as many more as the GPUs of inference need."""

    gpus_per_node: int | None = Field(None, ge=1)
    """GPUs that each node of the job has. Default: as many as its daemons need."""

    extra_args: list[str] = Field(default_factory=list)
    """More arguments for sbatch, one string each."""


class RayConfig(BaseConfig):
    """The Ray cluster."""

    address: str = Field("auto", min_length=1)
    """Address of the cluster. auto: the cluster of this machine."""

    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Custom resources that each daemon's node must have, by name."""


class DeploymentConfig(BaseConfig):
    """Where the daemons run."""

    engine: Engine = "local"
    """What starts the daemons: "local" on this machine, "slurm" in an allocation, "ray" on a cluster."""

    modules: dict[DaemonKind, str] = Field(default_factory=dict)
    """Other Python modules for daemons, for tests and for one's own engines: `trainer = "my.trainer"`."""

    trainer: TrainerDeployment = TrainerDeployment()
    """The trainer."""

    inference: InferenceDeployment = InferenceDeployment()
    """The inference servers."""

    slurm: SlurmConfig | None = None
    """Settings of engine "slurm"."""

    ray: RayConfig | None = None
    """Settings of engine "ray"."""

    @model_validator(mode="after")
    def _engine_has_it(self) -> Self:
        for engine, table in (("slurm", self.slurm), ("ray", self.ray)):
            if table is not None and self.engine != engine:
                raise ValueError(f'[deployment.{engine}] with engine = "{self.engine}": remove it, or set the engine')
        if self.engine == "local" and self.trainer.nodes > 1:
            raise ValueError(f'trainer.nodes = {self.trainer.nodes}: engine "local" has one machine; use slurm or ray')
        if self.engine != "local" and (self.trainer.gpus or self.inference.gpus):
            raise ValueError(
                f'gpus = [...] is for engine "local": with "{self.engine}" set gpus_per_node and gpus_per_replica'
            )
        if shared := sorted(set(self.trainer.gpus) & set(self.inference.gpus)):
            raise ValueError(f"trainer.gpus and inference.gpus both have {shared}: give each GPU to one of them")
        return self
