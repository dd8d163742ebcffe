"""What the C library does with memory that was freed, and the share of a GPU that a process takes."""

from __future__ import annotations

import sys

import pytest
import torch

from prime_rl.lora.linear import take_share
from prime_rl.utils.runtime import give_back_holes
from tests.fit_main import memory

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="other libraries decide for themselves")
def test_holes_between_what_is_kept_go_back_to_the_system() -> None:
    # Below glibc's least size of a block with a mapping of its own: all of them lie in the heap.
    blocks = [b"x" * (100 << 10) for _ in range(1000)]
    del blocks[::2]
    held = memory("VmRSS")
    give_back_holes()
    assert held - memory("VmRSS") > 40 * MIB
    assert len(blocks) == 500


@pytest.mark.parametrize(("free_gib", "usable_gib"), [(70, 39), (20, 20)])
def test_a_share_of_a_gpu_holds_what_torch_does_not_count(
    monkeypatch: pytest.MonkeyPatch, free_gib: int, usable_gib: int
) -> None:
    fractions = list[float]()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    assert take_share(0.5) == usable_gib << 30
    assert fractions == [39 / 80]
