"""Weights & Biases. One W&B run for the life of a run, however often it is started. All share W&B's one process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from daemons.monitors.base import importing, kept_id
from prime_rl.configs.monitors import WandbConfig
from prime_rl.contract.files import make_folder
from prime_rl.utils.secrets import WANDB_VARIABLE, read_secret

# Without a network, or without a key, W&B must give up rather than wait for a person.
INIT_TIMEOUT_S = 60.0


class WandbMonitor:
    """Figures over `step`, as trainer and orchestrator are at different steps at the same time."""

    name = "wandb"
    wants_all = True

    def __init__(self, config: WandbConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._run: Any = None

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Begin the W&B run, or resume it when online. Raises MonitorError without the package, and what W&B raises."""
        with importing("wandb"):
            import wandb
        make_folder(self._folder / "wandb")  # else W&B takes the system's temporary folder
        self._run = wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            mode=self._config.mode,
            dir=str(self._folder),
            id=kept_id(self._folder / "wandb_id.txt"),
            name=run_id,
            config=dict(config),
            reinit="create_new",  # beside those of other runs
            resume="allow" if self._config.mode == "online" else None,
            settings=wandb.Settings(
                api_key=read_secret(WANDB_VARIABLE, os.environ) if self._config.mode == "online" else None,
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                init_timeout=INIT_TIMEOUT_S,
            ),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the figures of one line to W&B, with their step beside them."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Finish the W&B run; does nothing when `start` failed."""
        if self._run is not None:
            self._run.finish()
