"""What the C library does with memory that was freed."""

from __future__ import annotations

import sys

import pytest

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
