"""A pilot for the console on a busy machine, and when its picture stands still."""

from __future__ import annotations

import asyncio
import time

from textual.app import App
from textual.pilot import Pilot

from tests.patience import PATIENCE_S, until
from tui.watcher import RunWatcher, WorkspaceWatcher

# The threads that go on while a screen is open, by the beginnings of their names.
WATCHING = (
    *("watch the workspace", "read the selected run", "read run_", "read the compared runs", "measure the machine"),
)

NUM_QUIET, QUIET_S = 3, 0.01  # how often in a row the app has nothing to do, and how long after each other it is asked


def screen_text(app: App[None]) -> str:
    """What is drawn, without the styles: exactly what reaches the terminal between its own style codes."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


def is_at_rest(app: App[None]) -> bool:
    """Whether every key was handled, and no message waits for the app or for what is on its screen."""
    if not app.is_running:
        return True
    screen = app.screen
    if not screen.is_mounted or getattr(app, "_keys", ()) or screen._callbacks:
        return False
    return all(pump._message_queue.empty() for pump in (app, *screen.walk_children(with_self=True)))


class PatientPilot(Pilot[None]):
    """Goes on after `press`, `click` and `pause` when all that they led to on the screen was done, and drawn.

    Textual's own pilot takes an app that uses no CPU for one that has nothing to do; on a busy machine it may be one
    that does not get to it. What a thread does is not waited for.
    """

    async def press(self, *keys: str) -> None:
        await self.app._press_keys(keys)
        await self.pause()

    async def pause(self, delay: float | None = None) -> None:
        if delay is not None:
            await super().pause(delay)
            return
        await self._wait_for_screen()
        deadline = time.monotonic() + PATIENCE_S
        num_quiet = 0
        while num_quiet < NUM_QUIET:
            assert time.monotonic() < deadline, f"after {PATIENCE_S} s the app still had something to do"
            await asyncio.sleep(QUIET_S)
            self.app.screen._on_timer_update()
            num_quiet = num_quiet + 1 if is_at_rest(self.app) else 0

    async def _wait_for_screen(self, timeout: float = PATIENCE_S) -> bool:
        return await super()._wait_for_screen(timeout)


async def settled(pilot: Pilot[None], *, num_same: int = 5) -> None:
    """Let the app work until what it asked of the disk is there and `num_same` pictures in a row are the same.

    No thread is then at work but those that watch.
    """
    seen: list[str] = []

    def same() -> bool:
        watchers = (getattr(pilot.app, "watcher", None), getattr(pilot.app.screen, "_watcher", None))
        is_behind = any(isinstance(each, WorkspaceWatcher | RunWatcher) and not each.is_caught_up for each in watchers)
        at_work = [each for each in pilot.app.workers if not each.is_finished and not each.name.startswith(WATCHING)]
        if is_behind or at_work or not is_at_rest(pilot.app):
            seen.clear()
            return False
        seen.append(screen_text(pilot.app))
        return len(seen) >= num_same and len(set(seen[-num_same:])) == 1

    await until(pilot, same, "a picture that stays")


async def sees(app: App[None], pilot: Pilot[None], *words: str) -> None:
    """Wait until all `words` stand on the screen at once."""

    def are_there() -> bool:
        drawn = screen_text(app)
        return all(each in drawn for each in words)

    await until(pilot, are_there, f"{words} on the screen")
