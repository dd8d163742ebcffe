"""The process group of one, and a device that is not there."""

from __future__ import annotations

import pytest
import torch

from prime_rl.trainer.world import WorldError, setup_world
from tests.trainer_support import solo_world


def test_a_process_alone_is_a_group_of_one() -> None:
    world = solo_world()
    assert (world.rank, world.size, world.is_master) == (0, 1, True)
    assert world.sum(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    world.store.set("key", "value")
    assert world.store.get("key") == b"value"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_device_is_named() -> None:
    with pytest.raises(WorldError, match="no CUDA device; set device = 'cpu'"):
        setup_world("cuda", 1.0)
