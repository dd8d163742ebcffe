"""What Discovery makes of files that come, change and go: hints and rescans, editors, half-written configs."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.trainer.runs.config_file import QUIET_S
from prime_rl.trainer.runs.discovery import CLOSE_LOOKS, Discovery, Findings

SETTLE_S = 0.5


def text_of(seed: int = 1) -> str:
    config = {"batch_size": 8, "rollouts_per_example": 4, "model": {"name": "m"}, "env": [{"id": "reverse-text"}]}
    return tomli_w.dumps({"seed": seed} | config)


def run_of(workspace: Path, run_id: str = "run_a", text: str | None = None) -> RunDir:
    run = RunDir(workspace / run_id)
    run.control.mkdir(parents=True)
    if text is not None:
        place(run, text)
    return run


def place(run: RunDir, text: str) -> None:
    """As `prl` does: whole, under another name, then renamed."""
    staged = run.control / ".orch.toml.tmp"
    staged.write_text(text)
    os.utime(staged, (1e9, 1e9))  # as if the write was long ago: clocks of file systems are coarse
    staged.rename(run.control / "orch.toml")


class Look:
    """A Discovery with a clock in the test's hand. `seeds`: of every config that was judged."""

    def __init__(self, workspace: Path, settle_s: float = SETTLE_S) -> None:
        self.now = 0.0
        self.seeds: list[int] = []
        self.discovery = Discovery(workspace, self._validate, settle_s, lambda: self.now)

    def _validate(self, config: OrchestratorConfig) -> str | None:
        self.seeds.append(config.seed)
        return "odious" if config.seed == 666 else None

    def __call__(self, *changed: Path, active: dict[str, int] | None = None, everything: bool = False) -> Findings:
        found = self.discovery.scan(active or {}, None if everything else set(changed))
        self.discovery.judge(found)
        self.discovery.report(found)
        return found

    def all(self, **arguments: dict[str, int]) -> Findings:
        return self(everything=True, **arguments)  # type: ignore[arg-type]

    def later(self, seconds: float) -> Findings:
        """What is found without any hint when time has passed."""
        self.now += seconds
        return self()


def ids(found: Findings) -> list[str]:
    return [candidate.run.run_id for candidate in found.candidates]


def test_a_renamed_config_counts_at_once_and_one_written_in_place_when_it_rests(tmp_path: Path) -> None:
    renamed, written = run_of(tmp_path, "run_a", text_of()), run_of(tmp_path, "run_b")
    written.orch_toml.write_text(text_of())
    look = Look(tmp_path)
    found = look.all()
    assert ids(found) == [renamed.run_id] and found.settling == [written.run_id] and found.due == QUIET_S
    assert sorted(ids(look.later(QUIET_S))) == ["run_a", "run_b"]


def test_a_half_written_config_is_no_error_until_it_stays_so(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    look = Look(tmp_path)
    look.all()
    run.orch_toml.write_text(text_of()[:-9])
    for _ in range(3):
        assert look(run.control).settling == ["run_a"] and not run.config_error.exists()
        look.now += 0.4 * SETTLE_S
        run.orch_toml.write_text(run.orch_toml.read_text()[:-1])
        look.all()
    run.orch_toml.write_text(text_of())
    look(run.control)
    assert ids(look.later(QUIET_S)) == ["run_a"] and not run.config_error.exists() and look.seeds == [1]


def test_a_config_that_stays_bad_is_reported_once_and_mended_without_a_flash(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path)
    look = Look(tmp_path)
    run.orch_toml.write_text(text_of()[:-9])
    look.all()
    due = look.later(QUIET_S).due
    assert due == SETTLE_S
    assert look.later(SETTLE_S).invalid == ["run_a"] and run.config_error.exists()
    look.all()
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    run.orch_toml.write_text(text_of())
    assert look(run.control).settling == ["run_a"] and run.config_error.exists(), "the last word stands until the next"
    assert ids(look.later(QUIET_S)) == ["run_a"] and not run.config_error.exists()


def test_the_same_content_is_judged_once(tmp_path: Path) -> None:
    run = run_of(tmp_path, text=text_of())
    look = Look(tmp_path)
    look.all()
    for save in (lambda: os.utime(run.orch_toml), lambda: run.orch_toml.write_text(text_of()), lambda: None):
        save()
        look(run.control)
        assert ids(look.later(QUIET_S)) == ["run_a"]
    assert look.seeds == [1]


def test_a_refusal_is_reported_though_the_content_came_back(tmp_path: Path) -> None:
    run = run_of(tmp_path, text=text_of(666))
    look = Look(tmp_path)
    look.all()
    look.later(SETTLE_S)
    assert "odious" in run.config_error.read_text()
    run.config_error.unlink()
    assert look(run.control).invalid == ["run_a"] and "odious" in run.config_error.read_text()


# How editors save, one file operation a step.


def vim(run: RunDir, text: str) -> Iterator[None]:
    path, backup = run.control / "orch.toml", run.control / "orch.toml~"
    (run.control / ".orch.toml.swp").write_bytes(b"b0VIM")
    yield
    path.rename(backup)
    yield
    yield from in_place(run, text)
    backup.unlink()
    (run.control / ".orch.toml.swp").unlink()
    yield


def emacs(run: RunDir, text: str) -> Iterator[None]:
    path, lock = run.control / "orch.toml", run.control / ".#orch.toml"
    lock.symlink_to("me@here.1:2")
    (run.control / "#orch.toml#").write_text(text[:-5])
    yield
    path.rename(run.control / "orch.toml~")
    yield
    yield from in_place(run, text)
    (run.control / "#orch.toml#").unlink()
    lock.unlink()
    yield


def in_place(run: RunDir, text: str) -> Iterator[None]:
    """VS Code and nano: emptied, then written, here in three parts."""
    with (run.control / "orch.toml").open("w", buffering=1) as file:
        yield
        for part in (text[:9], text[9:40], text[40:]):
            file.write(part)
            file.flush()
            yield


def renamed(run: RunDir, text: str) -> Iterator[None]:
    """sed -i, VS Code with atomic saves, rsync."""
    (run.control / "sedAbc").write_text(text)
    yield
    (run.control / "sedAbc").rename(run.control / "orch.toml")
    yield


def twice(run: RunDir, text: str) -> Iterator[None]:
    yield from in_place(run, text)
    (run.control / "orch.toml").write_text(text)
    yield
    os.utime(run.control / "orch.toml")
    yield


Save = Callable[[RunDir, str], Iterator[None]]


@pytest.mark.parametrize("save", [vim, emacs, in_place, renamed, twice])
def test_a_save_is_one_reload_whatever_the_editor_does(tmp_path: Path, save: Save) -> None:
    run = run_of(tmp_path, text=text_of(1))
    look = Look(tmp_path)
    look.all()
    for seed in (2, 3):
        for _ in save(run, text_of(seed)):
            look(run.control)
            look.now += QUIET_S / 5
            look()
            assert not run.config_error.exists()
        assert [each.config.seed for each in look.later(SETTLE_S).candidates] == [seed]
    assert look.seeds == [1, 2, 3]


def test_a_config_that_changes_in_its_slot_counts_from_the_next_admission(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path, text=text_of(1))
    look = Look(tmp_path)
    active = {"run_a": look.all().candidates[0].inode}
    with caplog.at_level(logging.INFO):
        for text in (text_of(1), text_of(2), text_of(2), "half ="):
            place(run, text)
            assert not look(run.control, active=active).gone
    assert [record.getMessage()[:30] for record in caplog.records] == ["run_a: orch.toml has changed; "] * 2
    assert look.seeds == [1] and not run.config_error.exists()
    place(run, text_of(2))
    assert [each.config.seed for each in look(run.control).candidates] == [2]


def test_a_hint_is_followed_where_it_points_and_a_lost_one_at_the_rescan(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, f"run_{name}", text_of(1)) for name in "abc"]
    look = Look(tmp_path)
    look.all()
    for run in runs:
        place(run, text_of(2))
    assert [each.config.seed for each in look(runs[1].control).candidates] == [1, 2, 1]
    assert [each.config.seed for each in look.all().candidates] == [2, 2, 2]


def test_each_stage_of_a_new_run_is_watched_for(tmp_path: Path) -> None:
    look = Look(tmp_path)
    run = RunDir(tmp_path / "run_a")
    run.path.mkdir()
    assert look(tmp_path).folders == [tmp_path, run.path]
    run.control.mkdir()
    assert look(run.path).folders == [tmp_path, run.control]
    place(run, text_of())
    assert ids(look(run.control)) == ["run_a"]
    shutil.rmtree(run.path)
    assert look(tmp_path).folders == [tmp_path]


def test_a_folder_that_is_deleted_and_made_again_is_another_run(tmp_path: Path) -> None:
    run = run_of(tmp_path, text=text_of(1))
    look = Look(tmp_path)
    active = {"run_a": look.all().candidates[0].inode}
    run.path.rename(tmp_path / "aside")
    run_of(tmp_path, text=text_of(2))
    found = look(tmp_path, active=active)
    assert "replaced" in found.gone["run_a"] and [each.config.seed for each in found.candidates] == [2]
    shutil.rmtree(run.path)
    assert look(tmp_path, active=active).gone == {"run_a": "its folder is gone"}


def test_a_folder_that_becomes_a_link_is_refused_and_not_watched(tmp_path: Path) -> None:
    workspace, outside = tmp_path / "workspace", tmp_path / "outside"
    run = run_of(workspace, text=text_of())
    run_of(outside, text=text_of())
    look = Look(workspace)
    active = {"run_a": look.all().candidates[0].inode}
    shutil.rmtree(run.control)
    run.control.symlink_to(outside / "run_a" / "control")
    found = look(run.control, active=active)
    assert "symbolic link" in found.refused["run_a"] and "symbolic link" in found.gone["run_a"]
    assert found.folders == [workspace]
    run.control.unlink()
    run.control.mkdir()
    place(run, text_of())
    assert ids(look.all()) == ["run_a"]


def test_a_linked_config_is_not_followed(tmp_path: Path) -> None:
    """Else the owner of a run could have any file of the machine opened."""
    run = run_of(tmp_path / "workspace")
    (tmp_path / "1.toml").write_text(text_of(1))
    run.orch_toml.symlink_to(tmp_path / "1.toml")
    look = Look(tmp_path / "workspace")
    assert look.all().candidates == []
    assert look.later(2 * SETTLE_S).invalid == ["run_a"]
    assert "is a symbolic link: must be a regular file" in run.config_error.read_text()
    run.orch_toml.unlink()
    place(run, text_of(2))
    assert [each.config.seed for each in look.all().candidates] == [2] and not run.config_error.exists()


def test_prints_spare_what_has_not_changed(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, f"run_{number}", text_of()) for number in range(3 * CLOSE_LOOKS)]
    later = Discovery(tmp_path, lambda config: None, wall_ns=lambda: time.time_ns() + 10**10)
    names = {run.run_id for run in runs}
    assert later.suspects() == names
    turns = [later.suspects() for _ in range(CLOSE_LOOKS)]
    assert {len(turn) for turn in turns} == {3} and set().union(*turns) == names, "each has its turn"
    in_order = sorted(runs, key=lambda run: run.run_id)
    changed = next(run for index, run in enumerate(in_order) if (index + 1) % CLOSE_LOOKS)
    for change in (
        lambda: place(changed, text_of(2)),
        lambda: changed.evicted.write_text("no"),
        lambda: changed.broadcast_dir(1).mkdir(parents=True),
        lambda: changed.rollouts.symlink_to(tmp_path),
        lambda: OutputDir(tmp_path).daemons.mkdir(),
        lambda: OutputDir(tmp_path).daemon_status(changed.run_id).write_text("{}"),
    ):
        while changed.run_id in later.suspects():
            pass
        change()
        again = later.suspects() | later.suspects()
        assert changed.run_id in again or not OutputDir(tmp_path).daemon_status(changed.run_id).exists()
    young = Discovery(tmp_path, lambda config: None)
    young.suspects()
    assert young.suspects() == names, "times that are too young are not believed"


# Sequences of file operations against a Discovery that has no memory.

RUN_IDS = ["run_a", "run_b"]
OPERATIONS = ["mkdir", "control", "place", "write", "bad", "touch", "unlink", "evict", "readmit", "rmtree", "replace"]


def operate(workspace: Path, run: RunDir, operation: str, number: int) -> list[Path]:
    """Do it as far as it can be done; the paths that changed."""
    config, has_control = run.control / "orch.toml", run.control.is_dir()
    if operation == "mkdir":
        run.path.mkdir(exist_ok=True)
        return [run.path]
    if operation == "control" and run.path.is_dir():
        run.control.mkdir(exist_ok=True)
        return [run.control]
    if operation in ("place", "write", "bad") and has_control:
        if operation == "place":
            place(run, text_of(number))
        else:
            config.write_text(text_of(number) if operation == "write" else f"seed = {number}")
        return [config]
    if operation == "touch" and config.exists():
        os.utime(config)
        return [config]
    if operation == "unlink":
        config.unlink(missing_ok=True)
        return [config]
    if operation == "evict" and has_control:
        run.evicted.write_text("no")
        return [run.evicted]
    if operation == "readmit":
        run.evicted.unlink(missing_ok=True)
        return [run.evicted]
    if operation == "rmtree":
        shutil.rmtree(run.path, ignore_errors=True)
        return [run.evicted, config, run.control, run.path]
    if operation == "replace" and run.path.is_dir():
        run.path.rename(workspace / f"aside_{number}_{time.monotonic_ns()}")
        run_of(workspace, run.run_id, text_of(number))
        return [run.path]
    return []


def verdicts(found: Findings) -> dict[str, object]:
    told: dict[str, object] = {each.run.run_id: each.config.seed for each in found.candidates}
    for word in ("invalid", "evicted", "failed", "finished", "unconfigured", "settling"):
        told |= dict.fromkeys(getattr(found, word), word)
    return told | found.refused


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(RUN_IDS), st.sampled_from(OPERATIONS), st.integers(1, 3), st.booleans()), max_size=25
    ),
    is_lossy=st.booleans(),
)
def test_memory_changes_no_verdict(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, int, bool]], is_lossy: bool
) -> None:
    workspace = tmp_path_factory.mktemp("workspace")
    look = Look(workspace)
    watched = set(look.all().folders)
    hints: set[Path] = set()
    for run_id, operation, number, looks in steps:
        changed = operate(workspace, RunDir(workspace / run_id), operation, number)
        if not is_lossy:
            hints |= {folder for path in changed for folder in (path, path.parent)} & watched
        if looks:
            look.now += QUIET_S
            found = look(*hints)
            # A folder that is new to the watcher gets a hint.
            hints, watched = set(found.folders) - watched, set(found.folders)
    while hints:
        found = look(*hints)
        hints, watched = set(found.folders) - watched, set(found.folders)
    found = look.all() if is_lossy else look()
    if found.due is not None:
        look.later(QUIET_S)
        found = look.later(SETTLE_S)
    assert verdicts(found) == verdicts(Look(workspace, settle_s=0).all())
