"""The commands of the tutorials, and of the pages about recovery and full fine-tuning, from top to bottom; own-task.md.

A page marks what is run: blocks of code that begin with ```sh. They run in one shell, in an empty folder.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_rl.contract.layout import OutputDir
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAGES = ("tutorial.md", "recover.md", "full_finetune.md", "tutorial-texts.md")
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BIN = Path(sys.executable).parent
# Of one page on a slow and busy machine; a page takes minutes.
LIMIT_S = 6 * PATIENCE_S
pytestmark = pytest.mark.timeout(LIMIT_S + PATIENCE_S)


def blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / "docs" / page).read_text())


def prl(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(BIN / "prl"), *words], cwd=folder, capture_output=True, text=True, check=False)


def bash(folder: Path, script: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the commands in one shell, until one fails; each is in stderr with its second."""
    return subprocess.run(
        ["bash", "-c", "\n".join(["PS4='+ $SECONDS s: '", "set -ex", *script])],
        check=False,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.release
def test_the_pages_with_commands_work_as_they_stand(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    try:
        done = bash(tmp_path, [block for page in PAGES for block in blocks(page)], environment)
        assert done.returncode == 0, done.stderr + done.stdout
    finally:
        for place in ("outputs/ten", "restored/outputs/ten", "outputs/whole", "outputs/three"):
            prl(tmp_path, "down", "--output-dir", place)
    check_runs(tmp_path)
    assert (tmp_path / "sorter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "reversing" / "model.safetensors").is_file()
    assert (tmp_path / "a-to-z" / "adapter_model.safetensors").is_file()


@pytest.mark.release
def test_the_page_of_a_task_of_ones_own_works_as_it_stands(tmp_path: Path) -> None:
    try:
        done = bash(tmp_path, blocks("own-task.md"), {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"})
        assert done.returncode == 0, done.stderr + done.stdout
    finally:
        prl(tmp_path, "down", "--output-dir", "outputs/own")
    (run,) = json.loads(prl(tmp_path, "runs", "list", "--json", "--output-dir", "outputs/own").stdout)["runs"]
    assert (run["state"], run["step"]) == ("finished", 16)
    assert (tmp_path / "mail-sorter" / "adapter_model.safetensors").is_file()


def check_runs(folder: Path) -> None:
    """Ten runs have ended: one, and nine of which the rungs have kept three and then one; also in the restored copy."""
    sweep: dict[str, Any] = json.loads(OutputDir(folder / "outputs" / "ten").sweep_decisions("sort").read_text())
    assert [(len(rung["kept"]), len(rung["lost"])) for rung in sweep["rungs"]] == [(3, 6), (1, 2)]
    for place in ("outputs/ten", "restored/outputs/ten"):
        listed = json.loads(prl(folder, "runs", "list", "--json", "--output-dir", place).stdout)["runs"]
        assert [run["state"] for run in listed] == ["finished"] * 10
        steps = {run["run_id"]: run["step"] for run in listed}
        assert (steps.pop("run_reverse"), steps.pop(sweep["rungs"][1]["kept"][0])) == (24, 54)
        assert max(steps.values()) < 54, "the others have ended early"
        status = json.loads(prl(folder, "status", "--json", "--output-dir", place).stdout)
        assert not status["supervisor_alive"]
