from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.contract.layout import (
    LayoutError,
    OutputDir,
    RunDir,
    TooManySteps,
    check_run_id,
    list_rollout_steps,
    list_steps,
    parse_step,
    scan_runs,
    stable_marker,
    step_name,
)
from prime_rl.contract.served import adapter_name, parse_adapter_name


@pytest.mark.parametrize("run_id", ["run_a", "run_1.5", "run_" + "x" * 64, "run_..", "run_-_."])
def test_good_run_ids(run_id: str) -> None:
    assert check_run_id(run_id) == run_id


@pytest.mark.parametrize(
    "run_id",
    ["", "run_", "a", "run_a/b", "run_/../x", "../run_a", "run_a\n", "run_ä", "run_" + "x" * 65, "run_a b", "run_a\0"],
)
def test_bad_run_ids_are_refused_by_name(run_id: str) -> None:
    with pytest.raises(LayoutError, match="invalid run id"):
        OutputDir(Path("/nowhere")).run(run_id)


def test_an_id_without_its_prefix_is_understood_in_the_message() -> None:
    with pytest.raises(LayoutError, match=r"did you mean 'run_a'\?"):
        check_run_id("a")
    with pytest.raises(LayoutError) as refused:
        check_run_id("../a")
    assert "did you mean" not in str(refused.value)


@given(st.text(max_size=80))
def test_no_run_id_leaves_the_workspace(text: str) -> None:
    workspace = OutputDir(Path("/nowhere/workspace"))
    try:
        path = workspace.run("run_" + text).path
    except LayoutError:
        return
    assert path.parent == workspace.path and path.name == "run_" + text


@given(st.integers(0, 10**10 - 1))
def test_step_names_round_trip(step: int) -> None:
    assert parse_step(step_name(step)) == step


@pytest.mark.parametrize("name", ["step_", "step_01", "step_-1", "step_1.tmp", ".step_1.x.tmp", "step_1\n", "astep_1"])
def test_what_is_no_step(name: str) -> None:
    assert parse_step(name) is None


def test_adapter_names_round_trip() -> None:
    assert parse_adapter_name(adapter_name("run_1.5", 12)) == ("run_1.5", 12)
    assert parse_adapter_name("run_a@v01") is None
    assert parse_adapter_name("models/base") is None


def test_scan_keeps_dots_in_names_and_refuses_links_and_files(tmp_path: Path) -> None:
    workspace, outside = tmp_path / "workspace", tmp_path / "outside"
    for folder in (workspace / "run_1.5" / "control", workspace / "run_b", workspace / "other", outside):
        folder.mkdir(parents=True)
    (workspace / "run_link").symlink_to(outside)
    (workspace / "run_file").write_text("")
    (workspace / "run_bad name").mkdir()
    (workspace / "run_c").mkdir()
    (workspace / "run_c" / "control").symlink_to(outside)
    runs, refused = scan_runs(workspace)
    assert [run.run_id for run in runs] == ["run_1.5", "run_b"]
    assert {r.name for r in refused} == {"run_link", "run_file", "run_bad name", "run_c"}
    assert "symbolic link" in next(r.reason for r in refused if r.name == "run_link")
    with pytest.raises(LayoutError, match="symbolic link"):
        OutputDir(workspace).run("run_link")


def test_scan_of_a_missing_folder_is_empty(tmp_path: Path) -> None:
    assert scan_runs(tmp_path / "none") == ([], [])


def test_orch_toml_falls_back_to_the_older_place(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run_a")
    assert run.orch_toml == run.control / "orch.toml"
    older = run.path / "configs" / "orch.toml"
    older.parent.mkdir(parents=True)
    older.write_text("")
    assert run.orch_toml == older
    run.control.mkdir()
    (run.control / "orch.toml").write_text("")
    assert run.orch_toml == run.control / "orch.toml"


def test_steps_beyond_number_and_a_marker_of_no_name_end_no_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_rl.contract.layout.MAX_ENTRIES", 20)
    run = RunDir(tmp_path / "run_a")
    for step in range(20):
        run.broadcast_dir(step).mkdir(parents=True)
    stable_marker(run.broadcast_dir(9)).symlink_to("a" * 300)  # no file system has such a name
    assert list_steps(run.broadcast, stable_only=True) == []
    assert list_steps(run.broadcast) == list(range(20))
    (run.broadcast / "step_20").touch()
    with pytest.raises(TooManySteps, match="broadcast has more than 20 entries: remove the oldest"):
        list_steps(run.broadcast)


def test_steps_are_listed_by_number_and_by_marker(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run_a")
    for step in (10, 9, 2):
        run.broadcast_dir(step).mkdir(parents=True)
    stable_marker(run.broadcast_dir(9)).touch()
    (run.broadcast / ".step_11.abc.tmp").mkdir()
    assert list_steps(run.broadcast) == [2, 9, 10]
    assert list_steps(run.broadcast, stable_only=True) == [9]
    assert list_steps(run.checkpoints) == []
    run.rollout_dir(3).mkdir(parents=True)
    run.rollout_dir(4).mkdir()
    run.rollout_file(4).touch()
    assert list_rollout_steps(run) == [4]
