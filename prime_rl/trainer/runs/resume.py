"""An explicit `ckpt.resume_step`: asked for in `orch.toml`, carried out once, remembered in `control/resumed.json`."""

from __future__ import annotations

import hashlib

import msgspec

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.layout import RunDir

RESUMED_VERSION = 1


class ResumeRequest(msgspec.Struct, frozen=True):
    """Which step was asked for, and in which text: the same text is never carried out twice, a changed one is."""

    resume_step: int
    config_sha256: str
    version: int = RESUMED_VERSION


def pending_request(run: RunDir, config: OrchestratorConfig) -> ResumeRequest | None:
    """The explicit request of the config, or None when there is none or it was carried out already."""
    if config.ckpt.resume_step < 0:
        return None
    digest = hashlib.sha256(run.orch_toml.read_bytes()).hexdigest()
    request = ResumeRequest(config.ckpt.resume_step, digest)
    try:
        done = msgspec.json.decode(run.resumed.read_bytes(), type=ResumeRequest)
    except (FileNotFoundError, msgspec.MsgspecError):
        return request
    return None if done == request else request
