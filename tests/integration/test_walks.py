"""The walks of docs/explanation pass through each file that they list."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from daemons.cli import app as prl
from prime_rl.contract.layout import OutputDir
from scripts.size import walks
from tests.system_support import ROOT
from tests.tui_support import build_workspace, opened_app

EXPLANATION = ROOT / "docs" / "explanation"


def listed(page: str) -> dict[str, set[str]]:
    text = (EXPLANATION / page).read_text()
    return {heading: {str(ROOT / path) for path in files} for heading, files in walks(text).items()}


@contextmanager
def called() -> Iterator[set[str]]:
    """The files of the functions that are called meanwhile, in threads that begin meanwhile too."""
    files: set[str] = set()

    def note(frame: object, event: str, arg: object) -> None:
        files.add(frame.f_code.co_filename)  # type: ignore[attr-defined]

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_a_pause_until_its_mark(tmp_path: Path) -> None:
    run = OutputDir(tmp_path).run("run_a")
    run.control.mkdir(parents=True)
    run.orch_toml.write_text((ROOT / "configs" / "demo" / "upper.toml").read_text())
    with called() as files:
        result = CliRunner().invoke(prl, ["runs", "pause", "run_a", "--output-dir", str(tmp_path)])
    assert result.exit_code == 0 and run.paused.exists(), result.output
    assert listed("pause.md")["To the mark"] <= files


@pytest.mark.slow
async def test_a_status_file_until_the_screen(tmp_path: Path) -> None:
    workspace = build_workspace(tmp_path)
    with called() as files:
        async with opened_app(workspace):
            pass
    assert listed("screen.md")["The files"] <= files
