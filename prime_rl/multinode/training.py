"""A node's part of the update: batches and the trainer's config, its rank of the trainer, the copy of the weights."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import tomli_w

from prime_rl.contract.files import staged_dir, write_atomic
from prime_rl.contract.layout import stable_marker
from prime_rl.multinode.place import Place
from prime_rl.multinode.processes import Child
from prime_rl.multinode.tasks import InferenceServer, Now, Process, Task, size
from prime_rl.utils.network import bound_socket, interface_of

# For the ranks to find each other, on machines that are busy too: a node that is dead is found so by its beats.
JOIN_TIMEOUT_S = 900


class Training:
    """Phases 8 to 11 of one node."""

    def __init__(self, place: Place, server: InferenceServer) -> None:
        self._place = place
        self._server = server

    def prepare(self) -> Task:
        """The batch files of this iteration's updates, and the trainer's config."""
        place = self._place
        if place.is_proven("update"):
            return Now(lambda: True)
        sources = self._sources()
        state = place.proofs.sampler_state(place.steps[0] - 1)
        place.write_run()
        toml = place.config.trainer_toml(place.output.path) | {"stop_after_step": place.steps[-1]}
        write_atomic(self._toml, tomli_w.dumps(toml))
        return Process(
            lambda: place.join("train", sources, place.steps, "update", state), finish=lambda: place.is_proven("update")
        )

    def _sources(self) -> dict[str, str]:
        """Raises ValueError when this iteration has no rollouts that an update may learn from."""
        place, number = self._place, self._place.position.iteration
        proof = place.proofs.train(number)
        where = f"iteration {number} in {place.iteration.path}"
        if proof is None:
            raise ValueError(f"{where} has no rollouts: make them first with --rl-phase rollout")
        if (version := place.proofs.version(number)) != proof.policy_version:
            found = f"{where} has rollouts of policy version {proof.policy_version}, and the policy is at {version} now"
            raise ValueError(f"{found}: make them again with --rl-phase rollout")
        if proof.key != place.proofs.key:
            found = f"{where} has rollouts with other settings of model, environments, sampling or seed"
            raise ValueError(
                f"{found}: use the TOML that they were made with, or make them again with --rl-phase rollout"
            )
        if (lost := place.proofs.lost_task(number, proof)) is not None:
            raise ValueError(f"{where} has lost {lost}: make it again with --rl-phase rollout")
        return proof.sources

    @property
    def _toml(self) -> Path:
        return self._place.iteration.path / "trainer.toml"

    def config_is_ready(self) -> Task:
        """The wait of a worker until it sees the proof of the batches and the trainer's config."""
        return Now(lambda: self._place.is_proven("update") and self._toml.exists(), f"{self._toml} to be seen")

    def train(self) -> Task:
        """This node's rank of the trainer, until the last version of this iteration is published.

        The inference server is asked to end, and the trainer starts when it has.
        """
        self._server.give_up()  # of a group that came here from its first phase
        if self._is_published():  # by processes that were killed right after; a trainer would wait for more to do
            return Now(lambda: self._server.has_ended)

        def start() -> Child | None:
            master = self._place.setting.master()
            if master is None or not self._server.has_ended:
                return None
            if self._place.is_master:
                check_free(self._place.config.rendezvous_port)
            return self._place.child("trainer", self._torchrun(master), self._network())

        metrics = self._place.run.trainer_metrics
        return Process(start, measure=lambda: size(metrics), finish=self._is_published, is_shared=True)

    def _network(self) -> dict[str, str]:
        """The ranks meet on this node's interface, not on the one that its name happens to lead to (often loopback)."""
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        interface = interface_of(self._place.setting.address)
        found = {name: interface for name in names if interface and name not in os.environ}
        # Nodes may have different numbers of ranks.
        return {"TORCH_ELASTIC_WORKER_IDENTICAL": "0", **found}

    def _torchrun(self, master: str) -> list[str]:
        place = self._place
        name = f"{place.group.epoch}-{place.position.iteration}-{place.position.round}"
        conf = f"is_host={int(place.is_master)},join_timeout={JOIN_TIMEOUT_S},last_call_timeout=1"
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(place.group.members)), "--nproc-per-node", str(place.setting.num_ranks)),
            *("--max-restarts", "0"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{master}:{place.config.rendezvous_port}"),
            *("--rdzv-id", name, "--rdzv-conf", conf, "--local-addr", place.setting.address),
            *("-m", "prime_rl.trainer.train", "@", str(self._toml)),
        ]

    def _is_published(self) -> bool:
        return stable_marker(self._place.run.broadcast_dir(self._place.steps[-1])).exists()

    def copy_checkpoint(self) -> Task:
        """The copy of the iteration's last version into its folder, and the proof of it."""
        return Now(self._copy_checkpoint)

    def _copy_checkpoint(self) -> bool:
        place = self._place
        if place.is_proven("checkpoint"):
            return True
        if not self._is_published():
            return False
        step = place.steps[-1]
        with staged_dir(place.iteration.path / "adapter") as folder:
            shutil.copytree(place.run.broadcast_dir(step), folder, dirs_exist_ok=True)
        return place.prove("checkpoint", {"step": step})


def check_free(port: int) -> None:
    """Raises OSError when the port is in use: torchrun would report that in fifty lines."""
    try:
        bound_socket("", port).close()
    except OSError as error:
        raise OSError(f"rendezvous_port {port} is in use on this machine: set another one on all nodes") from error
