"""Which theme a terminal gets, and themes for terminals of 256 and of 16 colours.

Colours that a terminal does not have are rounded to others by the toolkit, and what differs by a shade becomes the
same or garish. So these themes use only colours that such terminals have: the grey ramp and the cube, or the sixteen.
They are chosen by themselves; what is remembered is the theme that a person chose (`base_name`).
"""

from __future__ import annotations

from textual.color import Color

from tui.palette import DARK, LIGHT, make_theme

# Backgrounds of rows: how much of a colour is mixed into the background unless a theme sets it.
ROWS = {"row-cursor": ("primary", 0.28), "row-blurred": ("primary", 0.18), "row-hover": ("primary", 0.08)}
ROWS["row-marked"] = ("accent", 0.16)


def _plain(panel: str, cursor: str, marked: str, hover: str, line: str, muted: str) -> dict[str, str]:
    """Theme variables without a shade that is not named."""
    return {
        "row-cursor": cursor,
        "row-blurred": cursor,
        "row-marked": marked,
        "row-hover": hover,
        "border": line,
        "border-blurred": line,
        "scrollbar": line,
        "block-cursor-background": cursor,
        "input-selection-background": cursor,
        "block-hover-background": panel,
        "footer-description-foreground": muted,
    }


DARK_256 = make_theme(
    "prl-dark-256",
    "#87afff #87d7ff #ffaf5f #d0d0d0 #121212 #1c1c1c #303030 #87d75f #d7af5f #ff5f87",
    _plain("#303030", "#4e4e4e", "#303030", "#262626", "#585858", "#8a8a8a"),
)
DARK_16 = make_theme(
    "prl-dark-16",
    "#55ffff #55ffff #ffff55 #ffffff #000000 #000000 #000000 #55ff55 #ffff55 #ff5555",
    _plain("#000000", "#0000aa", "#000000", "#000000", "#aaaaaa", "#aaaaaa") | {"block-cursor-foreground": "#ffffff"},
)
LIGHT_16 = make_theme(
    "prl-light-16",
    "#0000aa #0000aa #aa00aa #000000 #ffffff #ffffff #ffffff #00aa00 #aa5500 #aa0000",
    _plain("#ffffff", "#aaaaaa", "#ffffff", "#ffffff", "#555555", "#555555") | {"block-cursor-foreground": "#000000"},
)
THEMES = (DARK, LIGHT, DARK_256, DARK_16, LIGHT_16)
# (theme that was chosen, colours of the terminal as Rich names them) -> the theme that is shown.
_SHOWN = {
    (DARK.name, "256"): DARK_256.name,
    (DARK.name, "standard"): DARK_16.name,
    (LIGHT.name, "standard"): LIGHT_16.name,
}


def shown_name(chosen: str, color_system: str | None) -> str:
    """The theme to show where `chosen` was chosen, in a terminal of these colours."""
    return _SHOWN.get((chosen, color_system or ""), chosen)


def base_name(shown: str) -> str:
    """The theme that a person chose, from the one that is shown."""
    return next((chosen for (chosen, _), name in _SHOWN.items() if name == shown), shown)


def add_row_colours(variables: dict[str, str]) -> None:
    """Fill in the backgrounds of rows that the theme does not name."""
    background = Color.parse(variables["background"])
    for name, (colour, share) in ROWS.items():
        variables.setdefault(name, background.blend(Color.parse(variables[colour]), share).hex6)
