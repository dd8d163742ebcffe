"""Few colours: the themes hold only what such terminals have, and the theme that was chosen is the one remembered."""

from __future__ import annotations

import pytest
from rich.color import Color, ColorSystem
from textual.theme import Theme

from tui.app import DARK, DARK_16, DARK_256, LIGHT, LIGHT_16, add_row_colours, base_name, shown_name


def colours(theme: Theme) -> dict[str, str]:
    named = {key: value for key, value in vars(theme).items() if isinstance(value, str) and value.startswith("#")}
    return named | theme.variables


@pytest.mark.parametrize(
    ("theme", "system"),
    [(DARK_256, ColorSystem.EIGHT_BIT), (DARK_16, ColorSystem.STANDARD), (LIGHT_16, ColorSystem.STANDARD)],
)
def test_no_colour_is_rounded(theme: Theme, system: ColorSystem) -> None:
    for name, value in colours(theme).items():
        wanted = Color.parse(value)
        assert wanted.triplet is not None
        got = wanted.downgrade(system).get_truecolor()
        if system is ColorSystem.EIGHT_BIT:  # the grey ramp has steps of ten
            assert all(abs(a - b) <= 10 for a, b in zip(got, wanted.triplet, strict=True)), name
        else:
            # The sixteen look different in every terminal; Rich rounds to its own table.
            table = (0, 0x55, 0xAA, 0xFF)
            assert all(part in table for part in wanted.triplet), name


def test_the_cursor_and_the_marks_can_be_told_from_the_background() -> None:
    for theme in (DARK, LIGHT, DARK_256, DARK_16, LIGHT_16):
        variables = colours(theme)
        add_row_colours(variables)
        assert variables["row-cursor"] not in (variables["background"], variables["row-marked"]), theme.name


def test_a_terminal_gets_its_own_variant_and_the_choice_is_remembered() -> None:
    assert shown_name(DARK.name, "256") == DARK_256.name and base_name(DARK_256.name) == DARK.name
    assert shown_name(LIGHT.name, "standard") == LIGHT_16.name and base_name(LIGHT_16.name) == LIGHT.name
    assert shown_name(DARK.name, "truecolor") == DARK.name
    assert shown_name("nord", "256") == "nord" == base_name("nord")
    assert shown_name(DARK.name, None) == DARK.name
