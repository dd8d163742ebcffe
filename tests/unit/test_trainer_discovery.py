"""What Discovery makes of files that come, change and go: hints and rescans, editors, half-written configs."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl.configs.admitted import apply, read_effect, write_admitted
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.files import mark_stable
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.trainer.runs.discovery import (
    CLOSE_LOOKS,
    DEAR_S,
    DEAR_SHARE,
    MAX_REST_S,
    QUIET_S,
    Discovery,
    Findings,
    Leave,
    _Entry,
    find_leave,
)
from tests.discovery_support import SETTLE_S, Look, place, run_of, text_of


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


def test_a_finished_run_stays_finished_where_its_config_is_refused_now(tmp_path: Path) -> None:
    """A workspace may have been restarted with a smaller seq_len: what the run trained with was admitted."""
    run = run_of(tmp_path, text="max_steps = 2\n" + text_of(666))
    for step in (1, 2):
        run.broadcast_dir(step).mkdir(parents=True)
        mark_stable(run.broadcast_dir(step))
    look = Look(tmp_path)
    look.all()
    assert look.later(SETTLE_S).invalid == ["run_a"] and run.config_error.exists(), "it was never admitted"
    write_admitted(run, read_effect(run), 0)
    assert look(run.control).finished == ["run_a"] and not run.config_error.exists()
    apply(run, "max_steps = 3\n" + text_of(666))
    look(run.control)
    assert look.later(SETTLE_S).invalid == ["run_a"], "one that is to train longer must fit"


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


def test_a_config_that_changes_in_its_slot_is_reported_once_and_an_invalid_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path, text=text_of(1))
    look = Look(tmp_path)
    active = {"run_a": look.all().candidates[0].inode}
    changed = []
    for text in (text_of(1), text_of(2), text_of(2), "half ="):
        place(run, text)
        found = look(run.control, active=active)
        assert not found.gone
        changed.append([config.seed for config in found.changed.values()])
    assert changed == [[], [2], [], []] and not caplog.records
    look.now += SETTLE_S
    assert not look(active=active).changed and not run.config_error.exists()
    assert [record.getMessage()[:40] for record in caplog.records] == ["run_a: its changed orch.toml is invalid,"]
    assert look.seeds == [1, 2]
    place(run, text_of(2))
    assert [each.config.seed for each in look(run.control).candidates] == [2]


def test_a_new_rule_is_no_change_of_a_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_of(tmp_path, text=text_of(1))
    look = Look(tmp_path)
    active = {"run_a": look.all().candidates[0].inode}
    look.discovery.forget_verdicts()
    with caplog.at_level(logging.INFO):
        assert not look.all(active=active).gone
    assert not caplog.records
    assert ids(look.all()) == ["run_a"] and look.seeds == [1, 1]


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
    assert "replaced" in found.gone["run_a"].reason and [each.config.seed for each in found.candidates] == [2]
    shutil.rmtree(run.path)
    assert look(tmp_path, active=active).gone["run_a"].reason == "its folder is gone"


def test_a_folder_is_known_by_its_own_inode_whatever_its_parent_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two differ on file systems in user space, and where something is mounted."""
    run, scandir = run_of(tmp_path, text=text_of()), os.scandir

    @contextlib.contextmanager
    def listed(path: Path) -> Iterator[list[SimpleNamespace]]:
        with scandir(path) as entries:
            yield [SimpleNamespace(name=entry.name, inode=lambda: 7) for entry in entries]

    look = Look(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", lambda path: listed(path) if path == tmp_path else scandir(path))
        (candidate,) = look.all().candidates
        assert candidate.inode == run.path.stat().st_ino
        assert look.all(active={"run_a": candidate.inode}).gone == {}


def test_a_folder_that_becomes_a_link_is_refused_and_not_watched(tmp_path: Path) -> None:
    workspace, outside = tmp_path / "workspace", tmp_path / "outside"
    run = run_of(workspace, text=text_of())
    run_of(outside, text=text_of())
    look = Look(workspace)
    active = {"run_a": look.all().candidates[0].inode}
    shutil.rmtree(run.control)
    run.control.symlink_to(outside / "run_a" / "control")
    found = look(run.control, active=active)
    assert "symbolic link" in found.refused["run_a"] and "symbolic link" in found.gone["run_a"].reason
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


def test_a_run_that_is_dear_to_look_at_takes_a_small_share_of_the_trainers_time(tmp_path: Path) -> None:
    look, run = Look(tmp_path), run_of(tmp_path, text=text_of(1))
    run_of(tmp_path, "run_b", text=text_of(2))
    look.dear_s = 2 * DEAR_S
    assert ids(look.all()) == ["run_a", "run_b"]
    look.dear_s = 0.0
    place(run, text_of(3))
    found = look(run.control)
    assert ids(found) == ["run_b"] and found.settling == ["run_a"] and found.due == pytest.approx(DEAR_S / DEAR_SHARE)
    assert ids(look.later(0.9 * found.due)) == ["run_b"] and look.seeds == [1, 2]
    assert ids(look.later(0.2 * found.due)) == ["run_a", "run_b"] and look.seeds == [1, 2, 3]


def test_whatever_a_look_at_one_run_raises_the_others_have_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run_a", "run_b", "run_c"):
        run_of(tmp_path, name, text=text_of(1))
    discovery, find = Discovery(tmp_path, lambda config: None), find_leave

    def fails(run: RunDir) -> Leave | None:
        if run.run_id != "run_c":
            raise RuntimeError("unforeseen")
        return find(run)

    monkeypatch.setattr("prime_rl.trainer.runs.discovery.find_leave", fails)
    found = discovery.scan({"run_a": (tmp_path / "run_a").stat().st_ino})
    discovery.judge(found)
    assert not found.gone and ids(found) == ["run_c"], "a run stays in its slot"
    assert set(found.refused) == {"run_b"} and "unforeseen" in found.refused["run_b"]


def test_however_dear_a_look_was_there_is_another_within_a_minute(tmp_path: Path) -> None:
    look, run = Look(tmp_path), run_of(tmp_path, text=text_of(1))
    look.dear_s = 1_000.0
    look.all()
    for seed in (2, 3):  # what is asked for during the rest makes it no longer
        place(run, text_of(seed))
        assert look(run.control).settling == ["run_a"]
    look.later(MAX_REST_S)
    assert look.seeds == [1, 3]


def test_many_looks_that_are_each_cheap_count_together(tmp_path: Path) -> None:
    look, run = Look(tmp_path), run_of(tmp_path, text=text_of())
    look.dear_s = DEAR_S / 10
    for number in range(100):
        place(run, text_of(number))
        look.all()
        look.now += 0.01
    assert 10 <= len(look.seeds) <= 13, "what may be taken at once, and the share of a second"


def test_a_run_that_was_finished_is_validated_before_it_may_have_a_slot(tmp_path: Path) -> None:
    """Versions can be put there and removed by the owner of the run, and its config with them."""
    look, run = Look(tmp_path), run_of(tmp_path, text=text_of(666))
    write_admitted(run, read_effect(run), 0)
    last = run.broadcast_dir(OrchestratorConfig.model_fields["max_steps"].default)
    last.mkdir(parents=True)
    mark_stable(last)
    assert look.all().finished == ["run_a"] and look.seeds == []
    shutil.rmtree(last)
    assert look.all().candidates == []
    assert look.later(2 * SETTLE_S).invalid == ["run_a"] and set(look.seeds) == {666}


def test_what_fails_at_one_run_is_not_met_by_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_of(tmp_path, "run_a", text_of()), run_of(tmp_path, "run_b", text_of())
    judge = _Entry.judge

    def fails(entry: _Entry, *args: Any) -> str:
        if entry.run.run_id == "run_a":
            raise RecursionError("too deep")
        return judge(entry, *args)

    monkeypatch.setattr(_Entry, "judge", fails)
    found = Look(tmp_path).all()
    assert ids(found) == ["run_b"] and "RecursionError: too deep" in found.refused["run_a"]


def test_prints_spare_what_has_not_changed(tmp_path: Path) -> None:
    began_ns = time.time_ns()
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
    young = Discovery(tmp_path, lambda config: None, wall_ns=lambda: began_ns)
    young.suspects()
    assert young.suspects() == names, "times that are too young are not believed"
