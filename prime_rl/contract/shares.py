"""What a node of a group asks of the rollout workers on its machine, and what comes of an evaluation.

Written as JSON beside the rank files; read by `prime_rl.orchestrator.share`. A task is a number as text: the index of a
group in the run's example order, or of an example of the evaluation.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Split = Literal["train", "eval"]


class MakeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Make `tasks` with `policy_version`, served at `base_url`, into `rank_file`. `run` is the run's folder.

    `sampler_state` is that of the last batch before: what is known of the examples, the same on every node.
    """

    run: str
    base_url: str
    policy_version: int
    seq_len: int
    split: Split
    tasks: list[str]
    rank_file: str
    sampler_state: dict[str, Any] = {}


class JoinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Join the tasks, each from the rank file named for it: into batch files, or into the mean of an evaluation.

    `steps` are the updates that the groups feed, in equal parts and in order; of an evaluation the one policy version.
    `sampler_state` is the one that the groups were drawn with.
    """

    run: str
    split: Split
    sources: dict[str, str]
    steps: list[int]
    result: str
    sampler_state: dict[str, Any] = {}


class JoinResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was joined: mean reward of each step, or of each environment, and how many rollouts there were.

    `steps` are those of the request, `sampler_state` is that of the last batch.
    """

    rewards: dict[str, float]
    num_rollouts: int
    steps: list[int]
    sampler_state: dict[str, Any] = {}
