"""The keys at the foot of a screen, in terminals of many widths."""

from __future__ import annotations

from pathlib import Path

from tests.tui_run_support import Opened, opened_run
from tests.tui_support import build_workspace, screen_text


def foot(o: Opened) -> str:
    return screen_text(o.app).splitlines()[-1].rstrip()


async def test_no_key_at_the_foot_is_cut(tmp_path: Path) -> None:
    async with opened_run(build_workspace(tmp_path).path) as o:
        for width, last in [(80, "w Compare"), (140, "d Delete"), (44, "m Maximise"), (43, "← → Step"), (32, "? Help")]:
            await o.pilot.resize_terminal(width, 24)
            await o.until(lambda last=last: foot(o).endswith(last), f"{last} as the last of {width} columns")
        await o.pilot.resize_terminal(80, 24)
        await o.press("5")
        await o.until(lambda: foot(o).endswith("d Delete"), "the keys of another tab")
