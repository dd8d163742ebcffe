"""A Discovery on a workspace whose files the test writes, with a clock in the test's hand."""

from __future__ import annotations

import os
from pathlib import Path

import tomli_w

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.layout import RunDir
from prime_rl.trainer.runs.discovery import Discovery, Findings

SETTLE_S = 0.5


def text_of(seed: int = 1) -> str:
    config = {"batch_size": 8, "rollouts_per_example": 4, "model": {"name": "m"}, "env": [{"id": "reverse-text"}]}
    return tomli_w.dumps({"seed": seed} | config)


def run_of(workspace: Path, run_id: str = "run_a", text: str | None = None) -> RunDir:
    run = RunDir(workspace / run_id)
    run.control.mkdir(parents=True)
    if text is not None:
        place(run, text)
    return run


def place(run: RunDir, text: str) -> None:
    """As `prl` does: whole, under another name, then renamed."""
    staged = run.control / ".orch.toml.tmp"
    staged.write_text(text)
    os.utime(staged, (1e9, 1e9))  # as if the write was long ago: clocks of file systems are coarse
    staged.rename(run.control / "orch.toml")


class Look:
    """A Discovery with a clock in the test's hand.

    Attributes:
        seeds: of every config that was judged.
        dear_s: what judging one takes of a core.
    """

    def __init__(self, workspace: Path, settle_s: float = SETTLE_S) -> None:
        self.now = self.dear_s = self._spent_s = 0.0
        self.seeds: list[int] = []
        self.discovery = Discovery(workspace, self._validate, settle_s, lambda: self.now, spent=lambda: self._spent_s)

    def _validate(self, config: OrchestratorConfig) -> str | None:
        self.seeds.append(config.seed)
        self._spent_s += self.dear_s
        return "odious" if config.seed == 666 else None

    def __call__(self, *changed: Path, active: dict[str, int] | None = None, everything: bool = False) -> Findings:
        found = self.discovery.scan(active or {}, None if everything else set(changed))
        self.discovery.judge(found)
        self.discovery.report(found)
        return found

    def all(self, **arguments: dict[str, int]) -> Findings:
        return self(everything=True, **arguments)  # type: ignore[arg-type]

    def later(self, seconds: float) -> Findings:
        """What is found without any hint when time has passed."""
        self.now += seconds
        return self()
