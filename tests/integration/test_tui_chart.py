"""A chart between two layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.geometry import Size

from tests.tui_run_support import opened_run
from tests.tui_support import build_workspace
from tui.widgets.chart import Chart


async def test_one_that_has_grown_and_was_not_told_yet_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = build_workspace(tmp_path / "lab")
    async with opened_run(output.path) as o:
        chart = o.screen.charts.charts[0]
        chart.point_at(chart.data.window[1])
        for grown in (Size(chart.size.width + 40, chart.size.height + 20), chart.size):
            with monkeypatch.context() as patched:
                patched.setattr(Chart, "size", grown)
                lines = [chart.render_line(y) for y in range(grown.height)]
            assert {line.cell_length for line in lines} == {grown.width}
