"""Whole weights from the trainer to inference without a disk between them. Layer 1: both sides import it."""

from prime_rl.transfer.link import TransferError, WeightReceiver, WeightSender

__all__ = ["TransferError", "WeightReceiver", "WeightSender"]
