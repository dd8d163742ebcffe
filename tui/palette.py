"""The two themes, and the colours of the current theme for text that is built by hand (table cells, headers)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from textual.color import Color
from textual.theme import Theme

from tui.snapshot import Level


def make_theme(name: str, colours: str, variables: Mapping[str, str]) -> Theme:
    """`colours` in the order of their names below; corners and the space behind bars are background."""
    primary, secondary, accent, foreground, background, surface, panel, success, warning, error = colours.split()
    behind = ("background", "background-hover", "background-active", "corner-color")
    return Theme(
        name=name,
        primary=primary,
        secondary=secondary,
        accent=accent,
        foreground=foreground,
        background=background,
        surface=surface,
        panel=panel,
        success=success,
        warning=warning,
        error=error,
        dark=Color.parse(background).brightness < 0.5,
        variables={
            "footer-background": background,
            "footer-key-foreground": accent,
            **{f"scrollbar-{part}": background for part in behind},
            **variables,
        },
    )


DARK = make_theme(
    "prl-dark",
    "#7aa2f7 #7dcfff #ff9e64 #c8d3f5 #16161e #1a1b26 #24283b #9ece6a #e0af68 #f7768e",
    {
        "footer-description-foreground": "#8089b3",
        "block-cursor-foreground": "#16161e",
        "block-cursor-background": "#7aa2f7",
        "border": "#3b4261",
        "border-blurred": "#2a2e45",
        "scrollbar": "#2f344d",
        "scrollbar-hover": "#3b4261",
        "scrollbar-active": "#7aa2f7",
        "input-selection-background": "#7aa2f7 35%",
    },
)
LIGHT = make_theme(
    "prl-light",
    "#2e5aac #00708a #b15c00 #2b3048 #f4f4f7 #fbfbfd #e6e7ee #3d7a1f #8a5a00 #c0264b",
    {
        "footer-description-foreground": "#5b6180",
        "border": "#b4b9cf",
        "border-blurred": "#d3d6e3",
        "scrollbar": "#c9cddd",
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
