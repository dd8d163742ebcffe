"""Alerts in the console: what was reported is among the problems, and is acknowledged and muted there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.widgets import OptionList

from daemons.quiet import OpenIncident, write_open
from daemons.specs import ALERTS
from prime_rl.contract.layout import OutputDir
from tests.tui_support import NOW, build_workspace, opened_app, screen_text, until
from tui.screens.base import CommandScreen
from tui.screens.system import ProblemsScreen

FAILED = OpenIncident("run_failed", "run_crashed", "inference refused the adapter", NOW - 300)
COLLAPSED = OpenIncident("reward_collapsed", "run_sort-rank16", "mean reward of 10 batches is 0.1", NOW - 60)


def with_alerts(path: Path) -> OutputDir:
    output = build_workspace(path)
    output.component_config(ALERTS).parent.mkdir(parents=True)
    output.component_config(ALERTS).touch()
    write_open(output, {each.key: each for each in (FAILED, COLLAPSED)})
    return output


def audited(output: OutputDir) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in output.audit.read_text().splitlines()]
    return [(each["action"], each["detail"]) for each in lines if "detail" in each]


@pytest.mark.slow
async def test_alerts_are_acknowledged_and_muted_among_the_problems(tmp_path: Path) -> None:
    output = with_alerts(tmp_path / "lab")
    async with opened_app(output, "5", size=(120, 40)) as (app, pilot):

        async def sees(*words: str) -> None:
            for each in words:
                await until(pilot, lambda each=each: each in screen_text(app), f"{each!r}")

        screen = app.screen
        assert isinstance(screen, ProblemsScreen)
        await sees("run_sort-rank16 lost its reward: mean reward")
        keys = screen.problems.keys
        while screen.problems.selected != "run run_crashed":
            await pilot.press("j")
        assert keys.count("run run_crashed") == 1, "the problem and its alert are one line"
        await pilot.press("a")
        await sees("acknowledged by ")
        acknowledged = [("acknowledge", "run_failed:run_crashed")]
        await until(pilot, lambda: audited(output) == acknowledged, "the line in the audit log")

        await pilot.press("M")
        await sees("run_crashed for 1h", "run_failed of all runs and daemons until it is unmuted")
        await pilot.press("enter")
        await until(pilot, lambda: app.screen is screen, "the end of the dialog")
        await sees("; muted by ")
        await pilot.press("M")
        await sees("end the mute of run_crashed")
        assert app.screen.query_one(OptionList).highlighted == 0
        await pilot.press("enter")
        await until(pilot, lambda: app.screen is screen, "the end of the dialog")
        assert audited(output)[1:] == [("mute", "run_crashed for 3600 s"), ("unmute", "run_crashed")]

        await pilot.press("colon")
        await until(pilot, lambda: isinstance(app.screen, CommandScreen), "the command line")
        await pilot.press(*"mute run_upper 2h", "enter")
        await until(pilot, lambda: len(audited(output)) == 4, "the mute")
        assert audited(output)[-1] == ("mute", "run_upper for 7200 s")


@pytest.mark.slow
async def test_what_was_not_reported_is_not_acknowledged(tmp_path: Path) -> None:
    output = build_workspace(tmp_path / "lab")
    async with opened_app(output, "5", size=(120, 40)) as (app, pilot):
        await pilot.press("a", "M")
        assert isinstance(app.screen, ProblemsScreen)
        await pilot.press("colon", *"mute run_upper", "enter")
        await until(pilot, lambda: "no alerts in the system file" in screen_text(app), "why not")
