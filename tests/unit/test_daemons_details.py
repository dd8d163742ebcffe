"""What `prl runs show` and `prl status` know beyond the state: figures, errors, checkpoints, disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rich.console import Console

from daemons.commands.runs import details_view
from daemons.details import RunDetails, checkpoint_parts, read_details
from daemons.machine import MIN_FORECAST_S, DiskReader, disk_use
from daemons.workspace_reader import read_workspace
from prime_rl.configs.admitted import HIDDEN, hide_secrets
from prime_rl.contract.layout import RunDir
from tests.daemons_support import RUN_TOML


def details_of(workspace: Path, run_id: str = "run_a") -> RunDetails:
    run = read_workspace(workspace).run(run_id)
    assert run is not None
    return read_details(RunDir(workspace / run_id), run, None)


def make_run(workspace: Path) -> RunDir:
    run = RunDir(workspace / "run_a")
    for folder in (run.control, run.metrics, run.log.parent):
        folder.mkdir(parents=True)
    run.orch_toml.write_text(RUN_TOML.format(max_steps=3, model="m"))
    return run


def test_what_a_run_has(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for step, stable in ((2, True), (3, False)):
        run.trainer_checkpoint(step).mkdir(parents=True)
        (run.trainer_checkpoint(step) / "state").write_bytes(b"x" * 100_000)
        if stable:
            (run.checkpoint_dir(step) / "STABLE").touch()
    records = [{"step": 1, "loss": 3}, {"step": 2, "loss": 2, "time": 5.0}, {"step": 2, "eval/reward/mean": 0.5}]
    run.trainer_metrics.write_text("".join(json.dumps(each) + "\n" for each in records) + '{"step": 3, "lo')
    run.log.write_text(
        "2026-01-01T00:00:00Z INFO    x: an ERROR that is none\n2026-01-01T00:00:00Z WARNING x: careful\n"
        "Traceback (most recent call last):\n  File\nValueError: bad thing\n"
    )
    found = details_of(tmp_path)
    assert found.metrics == {"trainer": {"step": 2.0, "loss": 2.0, "time": 5.0, "eval/reward/mean": 0.5}}
    assert [line.rpartition(" ")[2] for line in found.errors] == ["careful", "thing"]
    assert [(each.step, each.stable, each.num_bytes >= 100_000) for each in found.checkpoints] == [
        *((2, True, True), (3, False, True))
    ]
    assert next(iter(found.disk)) == "checkpoints" and found.disk_complete
    assert found.config is not None and found.config["batch_size"] == 8


def test_the_average_of_an_evaluation_is_printed_by_its_name(tmp_path: Path) -> None:
    figures = {"step": 2, "eval/sums/avg@4": 0.5, "eval/sums/avg@4_se": 0.125, "eval/sums/truncated": 0.0}
    make_run(tmp_path).orchestrator_metrics.write_text(json.dumps(figures) + "\n")
    console = Console(width=200)
    with console.capture() as shown:
        console.print(details_view(details_of(tmp_path)))
    assert "step 2, eval/sums/avg@4 0.5, eval/sums/avg@4_se 0.125 and 1 more" in shown.get()


def test_a_run_with_nothing_and_with_a_broken_config(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.orch_toml.write_text("batch_size = [")
    found = details_of(tmp_path)
    assert (found.config, found.metrics, found.errors, found.checkpoints) == (None, {}, (), ())


def test_values_that_look_like_keys_are_hidden() -> None:
    config = {"env": [{"args": {"api_key": "s", "hf_token": "s", "max_tokens": 5}}], "client": {"api_key_var": "K"}}
    hidden = hide_secrets(config)
    assert hidden["env"] == [{"args": {"api_key": HIDDEN, "hf_token": HIDDEN, "max_tokens": 5}}]
    assert hidden["client"] == {"api_key_var": "K"}


def test_disk_use_counts_what_is_there_once_and_follows_no_link(tmp_path: Path) -> None:
    workspace, outside = tmp_path / "workspace", tmp_path / "outside"
    (workspace / "a").mkdir(parents=True)
    outside.mkdir()
    (outside / "big").write_bytes(b"x" * 1_000_000)
    (workspace / "file").write_bytes(b"x" * 100_000)
    os.link(workspace / "file", workspace / "a" / "same")
    (workspace / "link").symlink_to(outside)
    use = disk_use(workspace)
    assert use.complete and 100_000 <= use.num_bytes < 200_000
    ticks = iter(range(100))
    cut = disk_use(workspace, limit_s=1.5, clock=lambda: float(next(ticks)))
    assert not cut.complete
    for number in range(1100):
        (outside / str(number)).touch()
    looks = iter([False])
    assert not disk_use(outside, stop=lambda: next(looks, True)).complete, "it ends within a folder too"
    assert disk_use(tmp_path / "none").num_bytes == 0


def test_a_checkpoint_is_as_large_as_its_finished_files(tmp_path: Path) -> None:
    """Holes count, as in a copy; a write that goes on, or that a kill left behind, does not."""
    run, step = RunDir(tmp_path / "run_a"), 3
    for name in ("orchestrator", "trainer", ".trainer.0f0f0f0f0f0f.tmp"):
        (run.checkpoint_dir(step) / name).mkdir(parents=True)
        with (run.checkpoint_dir(step) / name / "sparse").open("wb") as file:
            file.truncate(1_000_000)
    assert checkpoint_parts(run, step) == {"orchestrator": 1_000_000, "trainer": 1_000_000}
    run.checkpoints.rename(tmp_path / "elsewhere")
    run.checkpoint_dir(step).mkdir(parents=True)
    run.trainer_checkpoint(step).symlink_to(tmp_path / "elsewhere")
    assert checkpoint_parts(run, step) == {}


def test_a_workspace_does_not_count_others_below_it(tmp_path: Path) -> None:
    """The default is `outputs`, and that of the demo is in it. A folder of that name within a run hides nothing."""
    for folder in ("demo", "team/demo", "run_a/x"):
        (tmp_path / folder / "daemons").mkdir(parents=True)
        (tmp_path / folder / "big").write_bytes(b"x" * 1_000_000)
    view = DiskReader(tmp_path).read()
    assert view is not None and 1_000_000 <= view.workspace_bytes < 2_000_000


def test_the_disk_is_full_at_this_pace(tmp_path: Path, monkeypatch: object) -> None:
    now = [0.0]
    reader = DiskReader(tmp_path, clock=lambda: now[0])
    first = reader.read()
    assert first is not None and first.full_in_s is None and first.free_bytes > 0
    assert reader._forecast(MIN_FORECAST_S, first.free_bytes) is None, "nothing grows"
    gone = first.free_bytes // 4
    left_s = reader._forecast(100.0, first.free_bytes - gone)
    assert left_s is not None and abs(left_s - 300.0) < 1
    assert DiskReader(tmp_path / "none").read() is None
