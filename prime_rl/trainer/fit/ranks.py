"""Rank 0 of a group that is only asked about: sharded models are made as on many ranks, and nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives of tensors without memory
import torch.testing._internal.distributed.fake_pg  # noqa: F401 (a group of which only this rank exists)
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@contextmanager
def mesh_of_ranks(num_ranks: int) -> Iterator[DeviceMesh]:
    """A mesh of `num_ranks`. In a trainer it is of its own group, which must have as many ranks: then a collective."""
    is_alone = not dist.is_initialized()
    if is_alone:
        dist.init_process_group("fake", rank=0, world_size=num_ranks, store=HashStore())
    try:
        yield init_device_mesh("cpu", (num_ranks,))
    finally:
        if is_alone:
            dist.destroy_process_group()
