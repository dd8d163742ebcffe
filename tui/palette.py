"""The two themes, and the colours of the current theme for text that is built by hand (table cells, headers)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from textual.color import Color
from textual.theme import Theme

from tui.snapshot import Level

DARK = Theme(
    name="house-dark",
    primary="#7aa2f7",
    secondary="#7dcfff",
    accent="#ff9e64",
    foreground="#c8d3f5",
    background="#16161e",
    surface="#1a1b26",
    panel="#24283b",
    success="#9ece6a",
    warning="#e0af68",
    error="#f7768e",
    dark=True,
    variables={
        "footer-background": "#16161e",
        "footer-key-foreground": "#ff9e64",
        "footer-description-foreground": "#8089b3",
        "block-cursor-foreground": "#16161e",
        "block-cursor-background": "#7aa2f7",
        "border": "#3b4261",
        "border-blurred": "#2a2e45",
        "scrollbar": "#2f344d",
        "scrollbar-hover": "#3b4261",
        "scrollbar-active": "#7aa2f7",
        "scrollbar-background": "#16161e",
        "scrollbar-background-hover": "#16161e",
        "scrollbar-background-active": "#16161e",
        "scrollbar-corner-color": "#16161e",
        "input-selection-background": "#7aa2f7 35%",
    },
)
LIGHT = Theme(
    name="house-light",
    primary="#2e5aac",
    secondary="#00708a",
    accent="#b15c00",
    foreground="#2b3048",
    background="#f4f4f7",
    surface="#fbfbfd",
    panel="#e6e7ee",
    success="#3d7a1f",
    warning="#8a5a00",
    error="#c0264b",
    dark=False,
    variables={
        "footer-background": "#f4f4f7",
        "footer-key-foreground": "#b15c00",
        "footer-description-foreground": "#5b6180",
        "border": "#b4b9cf",
        "border-blurred": "#d3d6e3",
        "scrollbar": "#c9cddd",
        "scrollbar-background": "#f4f4f7",
        "scrollbar-background-hover": "#f4f4f7",
        "scrollbar-background-active": "#f4f4f7",
        "scrollbar-corner-color": "#f4f4f7",
    },
)


@dataclass(frozen=True)
class Palette:
    """Colours as `#rrggbb`, fit for `rich.text.Text` styles."""

    text: str
    muted: str
    faint: str
    accent: str
    primary: str
    secondary: str
    success: str
    warning: str
    error: str

    def level(self, level: Level) -> str:
        colours = (self.muted, self.success, self.secondary, self.warning, self.error)
        return colours[level]


_NAMES = ("foreground", "background", "accent", "primary", "secondary", "success", "warning", "error")


def make_palette(variables: Mapping[str, str]) -> Palette:
    """From the theme's variables (`App.theme_variables`). Made once a theme: every line asks for it."""
    return _make_palette(*(variables[name] for name in _NAMES))


@functools.lru_cache(maxsize=8)
def _make_palette(*colours: str) -> Palette:
    named = dict(zip(_NAMES, colours, strict=True))

    def get(name: str) -> Color:
        return Color.parse(named[name])

    text, background = get("foreground"), get("background")
    return Palette(
        text=text.hex6,
        muted=text.blend(background, 0.36).hex6,
        faint=text.blend(background, 0.72).hex6,
        accent=get("accent").hex6,
        primary=get("primary").hex6,
        secondary=get("secondary").hex6,
        success=get("success").hex6,
        warning=get("warning").hex6,
        error=get("error").hex6,
    )
