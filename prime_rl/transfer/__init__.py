"""Whole weights from the trainer to inference without a disk between them. Layer 1: both sides import it."""

from prime_rl.transfer.link import WeightSender
from prime_rl.transfer.receiver import TransferError, WeightReceiver

__all__ = ["TransferError", "WeightReceiver", "WeightSender"]
