"""An evaluation that a person asks for, in `evaluations/NAME`: what is evaluated, each rollout, and the figures.

`prl eval` writes `job.json`, and starts `prime_rl.orchestrator.eval_job`, which appends a rollout a line to
`samples.jsonl` and prints `EvalProgress` and `EvalResult`, one line of JSON each.
"""

from __future__ import annotations

from typing import Any

import msgspec

JOB_FILE, SAMPLES_FILE = "job.json", "samples.jsonl"


class EvalJob(msgspec.Struct, frozen=True):
    """`targets`: by their names for people, the folder of the adapter below `evaluations/`; None: the base model.

    `config`: a run's, whose `[eval]` and environments are used. `source`: the file it comes from; what its environments
    name is beside that.
    """

    targets: dict[str, str | None]
    config: dict[str, Any]
    source: str


class EvalProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Rollouts made and failed of `total`. `waiting_on`: what holds them up, None when nothing does."""

    target: str
    done: int
    total: int
    waiting_on: str | None = None


class EvalResult(msgspec.Struct, frozen=True, tag="result"):
    """The figures of one target in one environment, without the prefix `eval/ENV/`; `problem`: why one failed."""

    target: str
    env: str
    num_examples: int = 0
    num_rollouts: int = 0
    num_failed: int = 0
    figures: dict[str, float] = {}
    problem: str | None = None


class EvalSample(msgspec.Struct, frozen=True):
    """One rollout; `number` counts those of its example. Its texts are untrusted: of environment and policy."""

    target: str
    env: str
    example_id: str
    number: int
    reward: float
    prompt: str
    completion: str
    num_completion_tokens: int
    truncated: bool
    metrics: dict[str, float] = {}
