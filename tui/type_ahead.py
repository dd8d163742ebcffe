"""Keys that come faster than the program looks: each is handled after the one before it, where that one led.

Over a slow line several keys come at once. Left alone, all of them go to the widget that has the focus when they come:
of `/step` the letters would be keys of the table, and of `:open` they would be lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from textual import events
from textual.app import App
from textual.dom import DOMNode
from textual.screen import ModalScreen
from textual.timer import Timer
from textual.widgets import Input

# When the widget that was to handle a key was removed, nothing reports the key as handled.
GIVE_UP_S = 0.5
# Never held up by other keys.
AT_ONCE = ("ctrl+c", "ctrl+q")


class KeysInOrder(App[None]):
    """An app that passes on a key when the one before it was handled, with all that it did to the focus."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._keys: deque[events.Key] = deque()
        self._num_handled = 0
        self._giving_up: Timer | None = None

    async def on_event(self, event: events.Event) -> None:
        """Hold back a key until those before it are handled; other events and the keys of AT_ONCE pass at once."""
        if not isinstance(event, events.Key) or event.is_forwarded or event.key in AT_ONCE:
            await super().on_event(event)
            return
        self._keys.append(event)
        if len(self._keys) == 1:
            await self._pass_on(event)

    async def _pass_on(self, event: events.Key) -> None:
        number, target = self._num_handled, self.focused or self.screen
        await super().on_event(event)

        def handled() -> None:
            # After what the key asked for: a line that is shown from the next refresh on, and then gets the focus.
            if self.screen_stack:  # else the app ends
                self.screen.call_after_refresh(self.call_later, self._next, number)

        def follow(path: Sequence[DOMNode]) -> None:
            for place, node in enumerate(path, start=1):
                if node.call_later(follow, path[place:]):  # else it is gone
                    return
            handled()

        # The way of the key itself, from the widget up to the app, which looks at the bindings; and of the message that
        # a binding may send the same way.
        follow([*target.ancestors_with_self, *target.ancestors_with_self])
        self._giving_up = self.set_timer(GIVE_UP_S, handled)

    async def _next(self, number: int) -> None:
        if number != self._num_handled:
            return
        if self._giving_up is not None:
            self._giving_up.stop()
        self._num_handled += 1
        self._keys.popleft()
        if self._keys and self.screen_stack:
            await self._pass_on(self._keys[0])


class LineScreen(ModalScreen[None]):
    """A screen with one line to type in: what is typed before the line has the focus is typed into it then."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead: list[events.Key] = []

    def on_key(self, event: events.Key) -> None:
        """Keep a key that comes before the line has the focus; escape is never kept."""
        if event.key != "escape" and not self._line_has_focus():
            event.stop()
            self._ahead.append(event)

    def on_descendant_focus(self) -> None:
        """Type the kept keys into the line as soon as it has the focus."""
        if self._line_has_focus():
            ahead, self._ahead = self._ahead, []
            for event in ahead:
                self.query_one(Input).post_message(events.Key(event.key, event.character))

    def _line_has_focus(self) -> bool:
        return any(line.has_focus for line in self.query(Input))
