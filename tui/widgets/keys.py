"""The keys at the foot of a screen: as many as stand there whole. `?` has them all."""

from __future__ import annotations

from textual.events import Resize
from textual.widgets import Footer, Label


class KeyFooter(Footer):
    def __init__(self) -> None:
        super().__init__(compact=True, show_command_palette=False)

    async def recompose(self) -> None:
        await super().recompose()
        self.call_after_refresh(self._hide_what_is_cut)

    def on_resize(self, event: Resize) -> None:
        self._hide_what_is_cut()

    def _hide_what_is_cut(self) -> None:
        """The first key that does not fit and all after it; with a label its keys, which stand before it."""
        shown = list(self.children)
        fits = next((at for at, key in enumerate(shown) if key.region.right > self.region.right), len(shown))
        if fits < len(shown) and isinstance(shown[fits], Label):
            fits -= 1
        for at, key in enumerate(shown):
            key.visible = at < fits
