"""Config of a multi-node group: what `prl multinode @ multinode.toml` trains, its timeouts, and the flags of one node.

The file is the same for all nodes: model, environments, trainer, inference. What differs between nodes (rank, weights,
phases) is set by flags, the same for `prl multinode` and for the node itself, which checks which values are allowed
together (`prime_rl.multinode.node`). The run is an ordinary run, `run_multinode`; its `orch.toml` is written from here.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from prime_rl.configs import EXAMPLES
from prime_rl.configs.base import BaseConfig, ConfigError, FlagParser, LogConfig, LoRAConfig, ModelConfig, build, merge
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.trainer import TrainerConfig

RUN_ID = "run_multinode"
# Of a loop without end; a schedule that ends somewhere needs `run.max_steps` or --max-iterations.
ENDLESS_STEPS = 1_000_000
_DECIDED_HERE = ("model", "batch_size", "max_steps", "max_async_level", "seq_len", "client")
# Settings that change no rollout: how an update learns, how many there are, what is kept and logged.
_LEARNING = {"optim", "scheduler", "loss", "advantage", "batch_size", "max_steps", "max_async_level"}
_SAID = {"ckpt", "log", "monitor", "samples", "watch", "client"}


class MultinodeConfig(BaseConfig):
    """`prl multinode @ multinode.toml`."""

    model: ModelConfig = ModelConfig()
    """Base model of trainer and inference."""

    lora: LoRAConfig = LoRAConfig()
    """The adapter that is trained."""

    seq_len: int = Field(2048, ge=8)
    """Longest sample in tokens."""

    groups_per_iteration: int = Field(ge=1)
    """Examples of one iteration: the tasks that are divided among the nodes."""

    updates_per_iteration: int = Field(1, ge=1, le=16)
    """Updates per iteration, each with an equal share of the groups. The later ones are off-policy by as many."""

    run: dict[str, Any]
    """The run's own settings, as in `orch.toml`: `rollouts_per_example`, `[[run.env]]`, `[run.optim]`, and others."""

    trainer: dict[str, Any] = Field(default_factory=dict)
    """The trainer's own settings, as in `trainer.toml`."""

    inference: dict[str, Any] = Field(default_factory=dict)
    """The inference servers' own settings, as in `inference.toml`."""

    heartbeat_s: float = Field(2.0, gt=0, le=60)
    """Seconds between two heartbeats of a node. A node is dead after three missed ones and two seconds."""

    gather_timeout_s: float = Field(600.0, gt=0)
    """How long the nodes wait for each other at the start, in seconds."""

    barrier_timeout_s: float = Field(3600.0, gt=0)
    """Longest wait at the end of a phase, in seconds."""

    gpus_per_node: int | None = Field(None, ge=1)
    """Ranks of the trainer on this node, one a GPU. Null: as many as it has GPUs, one without any. May differ between
    nodes."""

    loop_timeout_s: float = Field(120.0, ge=10)
    """How long a node's main loop may stand still before a node that is alive counts as lost. After a quarter of it the
    node is called stalled."""

    rendezvous_port: int = Field(29400, ge=1, le=65535)
    """Port of the master for the rendezvous of the trainer's ranks."""

    log: LogConfig = LogConfig()
    """Logging of the node and of its processes. May differ between nodes; shared processes take the master's."""

    def orchestrator(self, max_iterations: int | None) -> dict[str, Any]:
        """The run's `orch.toml`."""
        updates = self.updates_per_iteration
        max_steps = max_iterations * updates if max_iterations else ENDLESS_STEPS
        rollouts = self.run.get("rollouts_per_example", 1)
        decided = {
            "model": {"name": self.model.name, "lora": {"rank": self.lora.rank, "alpha": self.lora.alpha}},
            "batch_size": self.groups_per_iteration // updates * rollouts if isinstance(rollouts, int) else rollouts,
            "max_steps": max_steps,
            "max_async_level": updates - 1,
            "seq_len": self.seq_len,
        }
        return {"ckpt": {"interval": 1}, "log": self.log.model_dump(), **self.run, **decided}

    def trainer_toml(self, output_dir: Path) -> dict[str, Any]:
        """The trainer's config on all nodes."""
        shared = {
            "output_dir": str(output_dir),
            "max_concurrent_runs": 1,
            "seq_len": self.seq_len,
            "log": self.log.model_dump(),
            "model": {**self.model.model_dump(), "lora": self.lora.model_dump(mode="json")},
        }
        return merge(shared, self.trainer)

    def inference_toml(self, output_dir: Path, status_file: Path) -> dict[str, Any]:
        """The config of one node's inference server."""
        shared = {
            "output_dir": str(output_dir),
            "status_file": str(status_file),
            "port": 0,
            "max_concurrent_runs": 1,
            "max_versions_per_run": 2,
            "log": self.log.model_dump(),
            "model": {
                **self.model.model_dump(),
                "max_model_len": self.seq_len,
                "lora": self.lora.model_dump(mode="json"),
            },
        }
        return merge(shared, self.inference)

    def rollouts_key(self) -> str:
        """Digest of all that determines a rollout but the policy version: model, environments, sampling, seed."""
        run = build(OrchestratorConfig, self.orchestrator(1), "run")
        text = json.dumps(run.model_dump(mode="json", exclude=_LEARNING | _SAID), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @model_validator(mode="after")
    def _parts_are_whole(self) -> Self:
        if self.groups_per_iteration % self.updates_per_iteration:
            raise ValueError(
                f"groups_per_iteration: found {self.groups_per_iteration}: must be a multiple of "
                f"updates_per_iteration = {self.updates_per_iteration}"
            )
        if taken := sorted(set(_DECIDED_HERE) & self.run.keys()):
            raise ValueError(f"run.{taken[0]}: is set by the group: remove it")
        place = Path("outputs")
        try:
            run = build(OrchestratorConfig, self.orchestrator(1), "run")
            build(TrainerConfig, self.trainer_toml(place), "trainer")
            build(InferenceConfig, self.inference_toml(place, place), "inference")
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if run.init.from_ is not None:
            raise ValueError("run.init.from: not available on several nodes: remove it")
        if run.teaching is not None:
            raise ValueError('run.kind: "distill" is not available on several nodes: remove it')
        return self


EXAMPLE = "--data-path DATA --log-path LOGS --num-nodes 3 --rank-weights 2,1,1 --max-iterations 10 --master"
DEFAULT_TOML = EXAMPLES / "multinode" / "demo.toml"
_ENDING = """\
@ FILE.toml [--a.b VALUE ...]
                      what is trained and how (default: the example multinode/demo.toml)

All nodes get the same flags, except --master, --worker, --master-addr and --gpus-per-node. Exit codes: 0 done, 1 this
node failed, 2 wrong usage or refused by the group, 75 a node was lost (start the same commands again), 130 interrupted.
"""


def node_parser() -> FlagParser:
    """The parser of the flags; `@ FILE` and the overrides of its keys are not among them."""
    parser = FlagParser("prl multinode", EXAMPLE, _ENDING)
    add = parser.add_argument
    add("--data-path", type=Path, metavar="DIR", help="folder with data; model.name may be a folder below it")
    add("--log-path", type=Path, metavar="DIR", help="workspace that all nodes share (output_dir)")
    add("--rl-phase", default="both", metavar="MODE", help="both (default), rollout (phases 0-6) or update (7-13)")
    add("--eval-interval", type=int, metavar="N", help="evaluate the first iteration and every N-th after it")
    add("--rollout-split", metavar="WHICH", help="train-only or eval-only, with --rl-phase rollout (default: both)")
    add("--num-nodes", type=int, default=1, metavar="N", help="number of nodes (default 1)")
    add("--rank-weights", metavar="W0,W1,..", help="share of each node in the prompts of an iteration")
    add("--gpus-per-node", type=int, metavar="N", help="trainer ranks on this node (default: one for each GPU)")
    add("--master", action="store_true", help="this node is rank 0 and leads (or RANK=0, or NODE_RANK=0)")
    add("--worker", type=int, metavar="R", help="this node is rank R (or RANK=R, or NODE_RANK=R)")
    add("--master-addr", metavar="ADDRESS", help="the master's address (default: that of the outgoing interface)")
    add("--max-iterations", type=int, metavar="I", help="end after iteration I (default: never)")
    add("--elastic", action="store_true", help="continue without a lost worker; it may join again")
    add("--resume", action="store_true", help="resume an earlier start of this group; fail if there was none")
    add("--debug-mode", action="store_true", help="this node and its processes log at level debug")
    add("--dry-run", action="store_true", help="print what this command would do, by phase")
    return parser
