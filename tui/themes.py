"""Which theme a terminal gets, and themes for terminals of 256 and of 16 colours.

Colours that a terminal does not have are rounded to others by the toolkit, and what differs by a shade becomes the
same or garish. So these themes use only colours that such terminals have: the grey ramp and the cube, or the sixteen.
They are chosen by themselves; what is remembered is the theme that a person chose (`base_name`).
"""

from __future__ import annotations

from textual.color import Color
from textual.theme import Theme

from tui.palette import DARK, LIGHT

# Backgrounds of rows: how much of a colour is mixed into the background where a theme does not say it.
ROWS = {"row-cursor": ("primary", 0.28), "row-blurred": ("primary", 0.18), "row-hover": ("primary", 0.08)}
ROWS["row-marked"] = ("accent", 0.16)


def _plain(background: str, panel: str, cursor: str, marked: str, hover: str, line: str) -> dict[str, str]:
    """Theme variables without a shade that is not named."""
    return {
        "row-cursor": cursor,
        "row-blurred": cursor,
        "row-marked": marked,
        "row-hover": hover,
        "border": line,
        "border-blurred": line,
        "footer-background": background,
        "scrollbar": line,
        "scrollbar-background": background,
        "scrollbar-background-hover": background,
        "scrollbar-background-active": background,
        "scrollbar-corner-color": background,
        "block-cursor-background": cursor,
        "input-selection-background": cursor,
        "block-hover-background": panel,
    }


DARK_256 = Theme(
    name="house-dark-256",
    primary="#87afff",
    secondary="#87d7ff",
    accent="#ffaf5f",
    foreground="#d0d0d0",
    background="#121212",
    surface="#1c1c1c",
    panel="#303030",
    success="#87d75f",
    warning="#d7af5f",
    error="#ff5f87",
    dark=True,
    variables=_plain("#121212", "#303030", "#4e4e4e", "#303030", "#262626", "#585858")
    | {"footer-key-foreground": "#ffaf5f", "footer-description-foreground": "#8a8a8a"},
)
DARK_16 = Theme(
    name="house-dark-16",
    primary="#55ffff",
    secondary="#55ffff",
    accent="#ffff55",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#000000",
    success="#55ff55",
    warning="#ffff55",
    error="#ff5555",
    dark=True,
    variables=_plain("#000000", "#000000", "#0000aa", "#000000", "#000000", "#aaaaaa")
    | {"footer-key-foreground": "#ffff55", "footer-description-foreground": "#aaaaaa"}
    | {"block-cursor-foreground": "#ffffff"},
)
LIGHT_16 = Theme(
    name="house-light-16",
    primary="#0000aa",
    secondary="#0000aa",
    accent="#aa00aa",
    foreground="#000000",
    background="#ffffff",
    surface="#ffffff",
    panel="#ffffff",
    success="#00aa00",
    warning="#aa5500",
    error="#aa0000",
    dark=False,
    variables=_plain("#ffffff", "#ffffff", "#aaaaaa", "#ffffff", "#ffffff", "#555555")
    | {"footer-key-foreground": "#aa00aa", "footer-description-foreground": "#555555"}
    | {"block-cursor-foreground": "#000000"},
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
