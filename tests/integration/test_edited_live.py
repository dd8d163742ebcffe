"""A run's file is edited in a living system: what it trains with is what is shown, before and after a restart.

Quicker: `test_configs_admitted`, of the same on a trainer's manager and on files alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from prime_rl.contract.notes import read_admitted
from tests.integration.test_system_sharing import FOREVER, published
from tests.integration.test_tui_actions import outcome, select
from tests.system_support import Workspace, closed, make_workspace, read_metrics
from tests.tui_support import command, opened_app, screen_text, until
from tui.readers.run_config import ConfigReader, ConfigRequest

pytestmark = pytest.mark.release
RUN = "run_ed"
EDITED = (
    f"edited, not in effect: optim.lr 0.0015 -> 0.01: prl runs apply {RUN} (pause it first), or prl runs restore {RUN}"
)
opened = partial(opened_app, clock=time.time, size=(160, 40))


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory, untaught_model: Path) -> Iterator[Workspace]:
    """A run that trains without end with an lr of 0.0015, and one beside it with the same config that waits."""
    workspace = make_workspace(tmp_path_factory.mktemp("edited"), untaught_model, slots=1)
    for _ in closed(workspace):
        workspace.up()
        for name in ("ed", "twin"):
            path = workspace.write_run(name, max_steps=FOREVER)
            workspace.prl("runs", "add", str(path), "--set", "optim.lr=0.0015", "--set", "ckpt.interval=1")
        workspace.wait(lambda: published(workspace, RUN) >= 1, "the run to train")
        yield workspace


def edit(living: Workspace, old: str, new: str) -> None:
    path = living.run_dir(RUN).orch_toml
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def shown(living: Workspace, folder: Path) -> list[object]:
    """The lr as each reader has it."""
    view = living.json("runs", "show", RUN)
    living.prl("runs", "export", RUN, "--out", str(folder))
    data, _ = ConfigReader(living.output_dir, RUN).read(ConfigRequest())
    assert data is not None and data.text is not None
    differences = [each["key"] for each in living.json("runs", "diff", RUN, "run_twin")["config"]]
    return [
        view["config"]["optim"]["lr"],
        view["run"]["lr"],
        "lr = 0.0015" in data.text,
        "optim.lr" in differences,
        "0.0015" in (folder / "README.md").read_text(),
        view["run"]["edited"],
    ]


async def test_an_edit_is_shown_as_not_in_effect_before_and_after_a_restart(living: Workspace, tmp_path: Path) -> None:
    run = living.run_dir(RUN)
    edit(living, "lr = 0.0015", "lr = 0.01")
    wanted = [0.0015, 0.0015, True, False, True, EDITED]
    assert shown(living, tmp_path / "before") == wanted
    async with opened(living.output_dir) as (app, pilot):
        await select(app, pilot, RUN)
        await pilot.press("exclamation_mark")
        await until(pilot, lambda: "edited, not in effect" in screen_text(app), "the problem")
    living.prl("down")
    assert shown(living, tmp_path / "down") == wanted
    step = published(living, RUN)
    living.up()
    living.wait(lambda: published(living, RUN) > step, "the run to go on")
    assert shown(living, tmp_path / "after") == wanted
    assert {line["lr"] for line in read_metrics(run.trainer_metrics)} == {0.0015}


def test_an_invalid_edit_is_named_and_the_run_goes_on(living: Workspace) -> None:
    edit(living, "lr = 0.01", "lr = 0.01\nlearning = true")
    step = published(living, RUN)
    view = living.runs()[RUN]
    assert "orch.toml is invalid (" in view["edited"] and "unknown key" in view["edited"]
    assert (view["state"], view["max_steps"]) == ("active", FOREVER)
    living.wait(lambda: published(living, RUN) > step, "the run to go on")
    edit(living, "\nlearning = true", "")


async def test_an_edit_is_applied_to_a_paused_run_and_taken_back(living: Workspace) -> None:
    run = living.run_dir(RUN)
    assert "not while it is in its slot" in living.prl("runs", "apply", RUN, check=False).stderr
    living.prl("runs", "pause", RUN)
    living.wait(lambda: living.runs()[RUN]["run_idx"] is None, "the run to leave")
    living.prl("runs", "pause", "run_twin")
    living.wait(lambda: living.prl("runs", "apply", RUN, check=False).returncode == 0, "the run to be let go")
    step = published(living, RUN)
    living.prl("runs", "continue", RUN)
    living.wait(lambda: published(living, RUN) > step, "the run to go on")
    admitted = read_admitted(run)
    assert admitted is not None and [each.keys for each in admitted.history] == [[("optim.lr", "0.0015", "0.01")]]
    assert (admitted.history[0].step, living.runs()[RUN]["edited"]) == (step, None)
    assert read_metrics(run.trainer_metrics)[-1]["lr"] == 0.01
    edit(living, "lr = 0.01", "lr = 0.5")
    async with opened(living.output_dir) as (app, pilot):
        await select(app, pilot, RUN)
        await command(pilot, "restore")
        assert "restored" in (await outcome(app, pilot)).text
    assert "lr = 0.01" in run.orch_toml.read_text() and living.runs()[RUN]["edited"] is None


def test_a_folder_that_was_renamed_is_named_as_that_and_goes_on_under_its_own_name(living: Workspace) -> None:
    run, moved = living.run_dir(RUN), living.run_dir("run_moved")
    step = published(living, RUN)
    run.path.rename(moved.path)
    living.wait(lambda: "renamed or copied" in (living.runs()["run_moved"]["reason"] or ""), "its problem")
    moved.path.rename(run.path)
    living.prl("runs", "readmit", RUN)
    living.wait(lambda: published(living, RUN) > step, "the run to go on")
