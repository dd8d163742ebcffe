"""An explicit `ckpt.resume_step`: asked for in `orch.toml`, carried out once, remembered in `control/resumed.json`.

The trainer carries it out and writes the file. The orchestrator waits for that: what is on disk until then is void.
"""

from __future__ import annotations

import hashlib

import msgspec

from prime_rl.contract.files import FileRefused, read_file, write_atomic
from prime_rl.contract.layout import RunDir

RESUMED_VERSION = 1
# No config is larger (`prime_rl.configs.base`).
MAX_FILE_BYTES = 1_000_000


class ResumeRequest(msgspec.Struct, frozen=True):
    """The requested step and the text that asked for it: the same text is never carried out twice, a changed one is."""

    resume_step: int
    config_sha256: str
    version: int = RESUMED_VERSION


def pending_request(run: RunDir, resume_step: int) -> ResumeRequest | None:
    """The explicit request of the config, or None without one (-1) or when it was already carried out."""
    if resume_step < 0:
        return None
    request = ResumeRequest(resume_step, hashlib.sha256(read_file(run.orch_toml, limit=MAX_FILE_BYTES)).hexdigest())
    return None if done_request(run) == request else request


def done_request(run: RunDir) -> ResumeRequest | None:
    """The last request that was carried out, or None. Raises OSError."""
    try:
        return msgspec.json.decode(read_file(run.resumed, limit=MAX_FILE_BYTES), type=ResumeRequest)
    except (FileNotFoundError, FileRefused, msgspec.MsgspecError):
        return None


def note_done(run: RunDir, resume_step: int) -> None:
    """The text of the config as it stands now asks for nothing more. Raises OSError."""
    if request := pending_request(run, resume_step):
        write_atomic(run.resumed, msgspec.json.encode(request))
