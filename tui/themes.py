"""The themes, which of them a terminal gets, and the colours of the current one for text that is built by hand.

Colours that a terminal does not have are rounded to others by the toolkit, and what differs by a shade becomes the
same or garish. So the themes for terminals of 256 and of 16 colours use only colours that such terminals have: the grey
ramp and the cube, or the sixteen. They are chosen by themselves; what is remembered is the theme that a person chose
(`base_name`).
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.style import Style
from rich.theme import Theme as RichTheme
from textual.color import Color
from textual.theme import Theme


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


_NAMED = ("accent", "primary", "secondary", "success", "warning", "error")


def text_styles(variables: Mapping[str, str]) -> RichTheme:
    """Names for the colours of a theme (`App.theme_variables`), for text that is built by hand: "muted", "bold accent".

    "text" is the foreground; "muted" and "faint" lie between it and the background.
    """
    text, background = Color.parse(variables["foreground"]), Color.parse(variables["background"])
    colours = {name: Color.parse(variables[name]) for name in _NAMED}
    colours |= {"text": text, "muted": text.blend(background, 0.36), "faint": text.blend(background, 0.72)}
    styles: dict[str, Style] = {}
    for name, colour in colours.items():
        plain = Style(color=colour.hex6)
        bold = plain + Style(bold=True)
        styles |= {name: plain, f"bold {name}": bold, f"bold {name} reverse": bold + Style(reverse=True)}
    return RichTheme(styles)


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
