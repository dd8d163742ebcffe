"""Publish a new version of the whole model from memory: the folder marks that it exists, without its weights.

Inference sees the folder appear as always, and asks the sender for its weights. They are kept until the next version,
so a server that starts again, or a second one, gets them as often as it asks. Where the trainer has a GPU they are kept
on it, in the type that the model computes in: beside the version that is trained, that one, and for a moment the next.
"""

from __future__ import annotations

from pathlib import Path

from prime_rl.configs.shared import BroadcastConfig
from prime_rl.contract.layout import stable_marker
from prime_rl.trainer.broadcast import FileSystemWeightBroadcast, write_version
from prime_rl.trainer.checkpoint import WeightsSnapshot
from prime_rl.trainer.whole_model import ModelSnapshot
from prime_rl.transfer import WeightSender


class BroadcastError(OSError):
    """The sender cannot be opened; the message has the address and the reason."""


def open_broadcast(config: BroadcastConfig) -> FileSystemWeightBroadcast:
    """What `config.type` names (rank 0). Raises BroadcastError."""
    if config.type == "filesystem":
        return FileSystemWeightBroadcast()
    try:
        sender = WeightSender(config.host, config.port, timeout_s=config.timeout_s)
    except (OSError, RuntimeError) as error:
        raise BroadcastError(f"broadcast: cannot listen on {config.host} port {config.port}: {error}") from error
    return NCCLWeightBroadcast(sender)


class NCCLWeightBroadcast(FileSystemWeightBroadcast):
    """Offers a version through `sender` instead of writing its weights (rank 0)."""

    def __init__(self, sender: WeightSender) -> None:
        self._sender = sender

    def close(self) -> None:
        self._sender.close()

    def _put(self, target: Path, weights: WeightsSnapshot) -> None:
        published = weights.published()
        assert isinstance(published, ModelSnapshot), "adapters go through the disk: enforced by the config"
        # Also when the folder is there already, from before a restart of the trainer: the weights in memory were lost.
        self._sender.offer(label_of(target), published.tensors)
        if not stable_marker(target).exists():
            write_version(target, published.files.save)


def label_of(folder: Path) -> str:
    """What both sides call the version in `output_dir/run_X/broadcast/step_N`: the path below `output_dir`."""
    return folder.relative_to(folder.parent.parent.parent).as_posix()
