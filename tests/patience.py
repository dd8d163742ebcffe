"""How long tests wait for something that comes on every machine, however slow and busy it is.

Waits are for conditions and end with them, so this costs nothing where the code works. It is ten times what the longest
wait takes on an idle machine with two cores (a vLLM server that starts: 60 s). Where a deadline itself is tested, it
stands in the test. `PRL_TEST_PATIENCE_S` shortens it while debugging a wait that never ends.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from prime_rl.contract.files import wait_for

if TYPE_CHECKING:
    from textual.pilot import Pilot

PATIENCE_S = float(os.environ.get("PRL_TEST_PATIENCE_S", "600"))


def until_seen(condition: Callable[[], bool], what: str) -> None:
    """Wait for `condition()`; fails naming `what`."""
    wait_for(condition, what, timeout_s=PATIENCE_S)


async def until(pilot: Pilot[None], condition: Callable[[], bool], what: str, *, timeout_s: float = PATIENCE_S) -> None:
    """Let the app work until `condition()` on a screen that has its widgets; fails naming `what`.

    What is long in coming is looked for less often.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    pause_s = 0.02
    # A pushed screen is the app's screen before it is composed.
    while not (all(screen.is_mounted for screen in pilot.app.screen_stack[-1:]) and condition()):
        assert loop.time() < deadline, f"timed out after {timeout_s} s waiting for {what}"
        await pilot.pause(pause_s)
        pause_s = min(pause_s * 1.3, 0.1)
