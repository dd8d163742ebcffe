"""What people do to runs, with no daemon anywhere."""

from __future__ import annotations

import calendar
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from daemons import actions, cli
from daemons.errors import ActionError, WrongUseError
from daemons.trash import purge_trash
from daemons.workspace_reader import read_workspace
from prime_rl.configs.validate import key_of, load_run_config
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import RunStatus, StatusWriter, TrainerRunStatus, TrainerStatus
from prime_rl.trainer.runs.discovery import Discovery
from prime_rl.utils.process import ProcessId
from tests.daemons_support import RUN_TOML


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "reverse.toml"
    path.write_text(RUN_TOML.format(max_steps=3, model="m"))
    return path


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return tmp_path / "workspace"


def state(workspace: Path, run_id: str) -> tuple[str, str | None]:
    run = read_workspace(workspace).run(run_id)
    assert run is not None
    return str(run.state), run.reason


@pytest.fixture
def trainer(workspace: Path) -> Iterator[StatusWriter]:
    """A living trainer that holds nothing and has the limits of a small one."""
    workspace.mkdir()
    status = TrainerStatus(state="waiting", model="m", max_rank=8, max_seq_len=64, max_runs=2, max_async_level=3)
    writer = StatusWriter(OutputDir(workspace).trainer_status, status)
    yield writer
    writer.close(state="stopped")


def test_add_names_the_run_after_its_file_and_keeps_the_text(workspace: Path, source: Path) -> None:
    assert actions.add_run(workspace, source) == "run_reverse"
    assert actions.add_run(workspace, str(source)) == "run_reverse-2"
    assert (workspace / "run_reverse" / "control" / "orch.toml").read_text() == source.read_text(encoding="utf-8")
    assert sorted(entry.name for entry in workspace.iterdir()) == ["logs", "run_reverse", "run_reverse-2"]


@pytest.mark.parametrize(
    ("name", "run_id"),
    [("run_x.toml", "run_x"), ("a b/ü.toml", "run_-"), ("1.5.toml", "run_1.5"), ("n" * 90, "run_" + "n" * 58)],
)
def test_any_file_name_gives_an_id(workspace: Path, source: Path, name: str, run_id: str) -> None:
    path = source.parent / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(source.read_text(encoding="utf-8"))
    assert actions.add_run(workspace, path) == run_id


def test_runs_are_taken_in_the_order_in_which_they_were_added(workspace: Path, source: Path) -> None:
    """At the first look, by their configs' times: one that seems to be written in place would be passed over."""
    names = [f"run_{name}" for name in "cabed" * 5]
    added = [actions.add_run(workspace, source, run_id=f"{name}-{number}") for number, name in enumerate(names)]
    discovery = Discovery(workspace, lambda config: None, settle_s=60.0)
    found = discovery.scan({})
    discovery.judge(found)
    assert [each.run.run_id for each in found.candidates] == added


def test_add_twice_with_an_id_is_one_run(workspace: Path, source: Path) -> None:
    assert [actions.add_run(workspace, source, run_id="run_a") for _ in range(2)] == ["run_a", "run_a"]
    with pytest.raises(ActionError, match="run 'run_a' already exists"):
        actions.add_run(workspace, source, run_id="run_a", overrides={"seed": 7})
    assert len(audit(workspace)) == 1


def test_a_file_with_a_byte_order_mark_is_added_as_it_is(workspace: Path, source: Path) -> None:
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes())
    run = OutputDir(workspace).run(actions.add_run(workspace, source, run_id="run_a"))
    assert run.orch_toml.read_bytes() == source.read_bytes() and load_run_config(run.orch_toml).batch_size == 8
    assert actions.add_run(workspace, source, run_id="run_a") == "run_a" and actions.check_file(workspace, source) == []


def test_overrides_are_written_and_checked(workspace: Path, source: Path) -> None:
    run_id = actions.add_run(workspace, source, overrides={"optim": {"lr": 0.5}, "max_steps": 9})
    config = load_run_config(OutputDir(workspace).run(run_id).orch_toml)
    assert (config.optim.lr, config.max_steps, config.batch_size) == (0.5, 9, 8)
    with pytest.raises(ActionError, match=r"optim\.lr"):
        actions.add_run(workspace, source, overrides={"optim": {"lr": -1}})


def test_a_dry_run_changes_nothing(workspace: Path, source: Path) -> None:
    assert actions.add_run(workspace, source, dry_run=True) == "run_reverse"
    assert not workspace.exists()


def test_twenty_adds_at_once_are_twenty_runs(workspace: Path, source: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: actions.add_run(workspace, source), range(20)))
    assert len(set(ids)) == 20
    assert len(read_workspace(workspace).runs) == 20
    assert len(audit(workspace)) == 20


@pytest.mark.parametrize("run_id", ["run_a/../../b", "..", "run_", "a", "run_" + "x" * 65, "run_a\nb", ""])
def test_bad_ids_are_wrong_use_and_leave_nothing(workspace: Path, source: Path, run_id: str) -> None:
    with pytest.raises(WrongUseError) as error:
        actions.add_run(workspace, source, run_id=run_id)
    assert "\n" not in str(error.value)
    assert not workspace.exists()
    with pytest.raises(WrongUseError):
        actions.evict_run(workspace, run_id, "x")


def test_a_linked_run_is_never_written_to(workspace: Path, source: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "control").mkdir(parents=True)
    workspace.mkdir()
    (workspace / "run_a").symlink_to(outside)
    for act in (
        lambda: actions.add_run(workspace, source, run_id="run_a"),
        lambda: actions.evict_run(workspace, "run_a", "x"),
        lambda: actions.readmit_run(workspace, "run_a"),
        lambda: actions.delete_run(workspace, "run_a", force=True),
    ):
        with pytest.raises(ActionError, match="symbolic link"):
            act()
    assert list(outside.rglob("*")) == [outside / "control"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size = [", "line 1: not valid TOML"),
        ("batch_siz = 8", "did you mean 'batch_size'?"),
        (RUN_TOML.format(max_steps=0, model="m"), "max_steps: found 0"),
        (RUN_TOML.format(max_steps=1, model="m").replace("= 8", "= 7"), "multiple of rollouts_per_example = 4"),
    ],
)
def test_an_invalid_file_is_refused_with_the_place(workspace: Path, source: Path, text: str, message: str) -> None:
    source.write_text(text, encoding="utf-8")
    with pytest.raises(ActionError) as error:
        actions.add_run(workspace, source)
    assert str(source) in str(error.value) and message in str(error.value) and "\n" not in str(error.value)
    assert not workspace.exists()


def test_a_missing_file_is_named(workspace: Path, tmp_path: Path) -> None:
    with pytest.raises(ActionError, match=r"^not found: .*none\.toml$"):
        actions.add_run(workspace, tmp_path / "none.toml")


def test_the_living_trainers_limits_hold(workspace: Path, source: Path, trainer: StatusWriter) -> None:
    with pytest.raises(ActionError, match=r"model\.lora\.rank: found 16: must be at most the trainer's 8"):
        actions.add_run(workspace, source, overrides={"model": {"lora": {"rank": 16}}, "sampling": {"max_tokens": 8}})
    with pytest.raises(ActionError, match=r"model\.name: found 'other': must be the trainer's base model, 'm'"):
        actions.validate_file(workspace, source, overrides={"model": {"name": "other"}, "sampling": {"max_tokens": 8}})
    with pytest.raises(ActionError, match=r"max_async_level: found 4: must be at most 3"):
        actions.add_run(workspace, source, overrides={"max_async_level": 4, "sampling": {"max_tokens": 8}})


def test_without_a_trainer_its_last_config_holds(workspace: Path, source: Path) -> None:
    path = OutputDir(workspace).component_config("trainer")
    path.parent.mkdir(parents=True)
    path.write_text('seq_len = 100\n[model]\nname = "m"\n[model.lora]\nrank = 4\n')
    with pytest.raises(ActionError, match="must be at most the trainer's 4"):
        actions.validate_file(workspace, source, overrides={"model": {"lora": {"rank": 5}}})
    actions.validate_file(workspace, source, overrides={"model": {"lora": {"rank": 4}}})


def test_evict_and_readmit(workspace: Path, source: Path) -> None:
    run_id = actions.add_run(workspace, source)
    assert actions.evict_run(workspace, run_id, "too slow")
    assert not actions.evict_run(workspace, run_id, "another reason")
    assert state(workspace, run_id) == ("evicted", "too slow")
    assert actions.readmit_run(workspace, run_id)
    assert not actions.readmit_run(workspace, run_id)
    assert state(workspace, run_id) == ("stopped", None)
    with pytest.raises(ActionError, match="run 'run_none' not found"):
        actions.evict_run(workspace, "run_none", "x")
    assert [(line["action"], line["run_id"], line["reason"]) for line in audit(workspace)][1:] == [
        ("evict", run_id, "too slow"),
        ("readmit", run_id, ""),
    ]


def test_a_finished_run_is_not_evicted_and_one_that_was_continued_is_told(workspace: Path, source: Path) -> None:
    run = OutputDir(workspace).run(actions.add_run(workspace, source))
    run.broadcast_dir(3).mkdir(parents=True)
    (run.broadcast_dir(3) / "STABLE").touch()
    assert state(workspace, run.run_id) == ("finished", None)
    assert actions.EVICT(workspace, run.run_id, reason="x") == "run_reverse: already finished, so nothing was changed"
    assert not run.evicted.exists() and [line["action"] for line in audit(workspace)] == ["add"]
    actions.set_run_keys(workspace, run.run_id, {"max_steps": 5})
    assert actions.READMIT(workspace, run.run_id).startswith("run_reverse: is stopped: only a run that is evicted")


def test_a_finished_run_that_the_trainer_still_holds_is_evicted(
    workspace: Path, source: Path, trainer: StatusWriter
) -> None:
    """Its files say that it is finished; what others report protects the slot from a run that says so too early."""
    run = OutputDir(workspace).run(actions.add_run(workspace, source, overrides={"sampling": {"max_tokens": 8}}))
    run.broadcast_dir(3).mkdir(parents=True)
    (run.broadcast_dir(3) / "STABLE").touch()
    trainer.update(runs={run.run_id: TrainerRunStatus(run_idx=1, step=3, max_steps=3)})
    with pytest.raises(ActionError, match=r"but the trainer \(slot 1\) did not release it yet: try again"):
        actions.set_run_keys(workspace, run.run_id, {"max_steps": 5})
    assert actions.evict_run(workspace, run.run_id, "it holds a slot")
    assert run.evicted.read_text() == "it holds a slot"


def test_readmit_takes_away_the_last_word_of_a_failed_run(workspace: Path, source: Path) -> None:
    run = OutputDir(workspace).run(actions.add_run(workspace, source))
    run.status.write_bytes(msgspec.json.encode(RunStatus(run_id=run.run_id, state="failed", reason="no key")))
    assert state(workspace, run.run_id) == ("failed", "no key")
    assert actions.readmit_run(workspace, run.run_id)
    assert state(workspace, run.run_id) == ("stopped", None)


def test_delete_and_undelete(workspace: Path, source: Path) -> None:
    run_id = actions.add_run(workspace, source)
    text = (workspace / run_id / "control" / "orch.toml").read_text()
    lies = actions.delete_run(workspace, run_id)
    assert actions.delete_run(workspace, run_id) == lies
    assert lies.parent == OutputDir(workspace).trash and read_workspace(workspace).runs == ()
    assert actions.undelete_run(workspace, run_id)
    assert not actions.undelete_run(workspace, run_id)
    assert state(workspace, run_id) == ("stopped", None), "deletion leaves no eviction behind"
    assert (workspace / run_id / "control" / "orch.toml").read_text() == text


def test_undelete_keeps_an_eviction_that_was_there_before(workspace: Path, source: Path) -> None:
    run_id = actions.add_run(workspace, source)
    actions.evict_run(workspace, run_id, "too slow")
    actions.delete_run(workspace, run_id)
    actions.undelete_run(workspace, run_id)
    assert state(workspace, run_id) == ("evicted", "too slow")


def test_the_newest_of_several_deleted_runs_comes_back(workspace: Path, source: Path) -> None:
    for seed in (1, 2, 3):
        actions.add_run(workspace, source, run_id="run_a", overrides={"seed": seed})
        actions.delete_run(workspace, "run_a")
    actions.undelete_run(workspace, "run_a")
    assert load_run_config(OutputDir(workspace).run("run_a").orch_toml).seed == 3
    with pytest.raises(ActionError, match="run_a exists"):
        actions.undelete_run(workspace, "run_a")
    assert purge_trash(workspace) == 2
    assert purge_trash(workspace) == 0
    with pytest.raises(ActionError, match="nothing to restore"):
        actions.undelete_run(workspace, "run_b")


def test_purge_follows_no_links(workspace: Path, source: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    actions.delete_run(workspace, actions.add_run(workspace, source))
    (workspace / ".trash" / "link").symlink_to(tmp_path / "precious")
    assert purge_trash(workspace) == 2
    assert (tmp_path / "precious").is_dir()


def test_what_cannot_be_purged_keeps_nothing_else(
    workspace: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run_a", "run_b", "run_c"):
        actions.delete_run(workspace, actions.add_run(workspace, source, run_id=name))
    rmdir = os.rmdir

    def refuses(name: str, *, dir_fd: int) -> None:
        if name.startswith("run_b."):
            raise PermissionError(1, "Operation not permitted")
        rmdir(name, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuses)
        with pytest.raises(ActionError, match=r"cannot remove run_b\.\S+ \(Operation not permitted\).*; removed: 2"):
            purge_trash(workspace)
    assert [entry.name.partition(".")[0] for entry in OutputDir(workspace).trash.iterdir()] == ["run_b"]
    assert purge_trash(workspace) == 1


def test_what_was_deleted_long_ago_is_purged(workspace: Path, source: Path) -> None:
    for name in ("run_old", "run_new"):
        actions.delete_run(workspace, actions.add_run(workspace, source, run_id=name))
    trash = OutputDir(workspace).trash
    (new,) = trash.glob("run_new.*")
    os.rename(next(trash.glob("run_old.*")), trash / "run_old.20260101T000000Z-002")
    (trash / "stray").touch()
    day_s = 86_400.0
    now = calendar.timegm((2026, 1, 8, 0, 0, 1)) + 0.0
    os.rename(new, trash / "run_new.20260107T000000Z")
    assert actions.list_trash(workspace, older_than_s=7 * day_s, now=now) == [("run_old", "20260101T000000Z-002")]
    assert purge_trash(workspace, older_than_s=8 * day_s, now=now) == 0
    assert purge_trash(workspace, older_than_s=7 * day_s, now=now, reason="full") == 1
    assert sorted(entry.name for entry in trash.iterdir()) == ["run_new.20260107T000000Z", "stray"]
    assert (audit(workspace)[-1]["reason"], audit(workspace)[-1]["detail"]) == ("full", "run_old.20260101T000000Z-002")


def test_links_inside_a_deleted_run_lead_nowhere(workspace: Path, source: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    run = OutputDir(workspace).run(actions.add_run(workspace, source))
    (run.path / "rollouts").symlink_to(precious)
    (run.control / "link").symlink_to(precious / "file")
    actions.delete_run(workspace, run.run_id)
    assert purge_trash(workspace) == 1
    assert (precious / "file").exists()


def test_a_run_that_becomes_a_link_while_it_is_deleted_stays(
    workspace: Path, source: Path, trainer: StatusWriter, tmp_path: Path
) -> None:
    """While the delete waits for the trainer, the run's folder is replaced by a link to one outside."""
    precious = tmp_path / "precious"
    (precious / "control").mkdir(parents=True)
    run_id = actions.add_run(workspace, source, overrides={"sampling": {"max_tokens": 8}})
    trainer.update(runs={run_id: TrainerRunStatus(run_idx=1)}, state="training")

    def swap(message: str) -> None:
        os.rename(workspace / run_id, tmp_path / "aside")
        (workspace / run_id).symlink_to(precious)
        trainer.update(runs={}, state="waiting")

    with pytest.raises(WrongUseError, match="symbolic link"):
        actions.delete_run(workspace, run_id, force=True, wait_s=20, on_progress=swap)
    assert (workspace / run_id).is_symlink() and list(OutputDir(workspace).trash.iterdir()) == []
    assert [entry.name for entry in precious.rglob("*")] == ["control"]


@pytest.mark.parametrize("act", ["delete", "undelete", "purge"])
def test_a_trash_that_is_a_link_is_refused(workspace: Path, source: Path, tmp_path: Path, act: str) -> None:
    run_id = actions.add_run(workspace, source)
    if act != "delete":
        actions.delete_run(workspace, run_id)
        os.rename(workspace / ".trash", tmp_path / "outside")
    (tmp_path / "outside").mkdir(exist_ok=True)
    (workspace / ".trash").symlink_to(tmp_path / "outside")
    before = sorted(tmp_path.rglob("*"))
    call = {
        "delete": actions.delete_run,
        "undelete": actions.undelete_run,
        "purge": lambda h, _: purge_trash(h),
    }
    with pytest.raises(ActionError, match="is a symbolic link; nothing was changed: remove the link"):
        call[act](workspace, run_id)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_private_file_stays_private(workspace: Path, source: Path) -> None:
    source.chmod(0o600)
    run = OutputDir(workspace).run(actions.add_run(workspace, source))
    changed = OutputDir(workspace).run(actions.add_run(workspace, source, overrides={"seed": 3}))
    assert [stat.S_IMODE(each.orch_toml.stat().st_mode) for each in (run, changed)] == [0o600, 0o600]
    source.chmod(0o640)
    public = OutputDir(workspace).run(actions.add_run(workspace, source))
    assert stat.S_IMODE(public.orch_toml.stat().st_mode) == 0o644


def test_every_problem_is_found_also_those_that_others_hide(
    workspace: Path, source: Path, trainer: StatusWriter
) -> None:
    text = RUN_TOML.format(max_steps=0, model="other").replace("rollouts_per_example = 4", "rollouts_per_example = 3")
    source.write_text(
        text + "odd = 1\n[optim]\nlr = -1\n[model.lora]\nrank = 9\n[sampling]\nmax_tokens = 80\n", encoding="utf-8"
    )
    found = {key_of(problem): problem.message for problem in actions.check_file(workspace, source)}
    assert set(found) == {
        *("max_steps", "optim.lr", "env.0.odd", "batch_size", "model.name", "model.lora.rank", "sampling.max_tokens")
    }
    assert found["model.lora.rank"] == "found 9: must be at most the trainer's 8", "the trainer's own words"


@pytest.mark.parametrize(
    "missing", ["batch_size = 8\n", "rollouts_per_example = 4\n", '[[env]]\nid = "reverse-text"\n']
)
def test_what_is_missing_hides_nothing(workspace: Path, source: Path, trainer: StatusWriter, missing: str) -> None:
    text = RUN_TOML.format(max_steps=1, model="m").replace(missing, "")
    source.write_text(text + "[sampling]\nmax_tokens = 64\n", encoding="utf-8")
    found = [key_of(problem) for problem in actions.check_file(workspace, source)]
    assert found == [missing.split(maxsplit=1)[0].strip("[]"), "sampling.max_tokens"]


def test_a_done_action_that_cannot_be_noted_says_both(workspace: Path, source: Path) -> None:
    run_id = actions.add_run(workspace, source)
    OutputDir(workspace).audit.unlink()
    OutputDir(workspace).audit.mkdir()
    with pytest.raises(
        ActionError, match=f"evict {run_id} succeeded, but could not be recorded in .*is a folder: must"
    ):
        actions.evict_run(workspace, run_id, "x")
    assert state(workspace, run_id) == ("evicted", "x")


def test_a_run_that_trains_is_deleted_by_force_only_and_after_it_is_let_go(
    workspace: Path, source: Path, trainer: StatusWriter
) -> None:
    run_id = actions.add_run(workspace, source, overrides={"sampling": {"max_tokens": 8}})
    trainer.update(runs={run_id: TrainerRunStatus(run_idx=1)}, state="training")
    with pytest.raises(ActionError, match=r"in use by the trainer \(slot 1\)"):
        actions.delete_run(workspace, run_id)
    assert not OutputDir(workspace).run(run_id).evicted.exists()
    with pytest.raises(ActionError, match=r"did not release it within 0\.5 s; it stays evicted"):
        actions.delete_run(workspace, run_id, force=True, wait_s=0.5)
    said: list[str] = []

    def let_go(message: str) -> None:
        said.append(message)
        trainer.update(runs={}, state="waiting")

    actions.delete_run(workspace, run_id, force=True, wait_s=20, on_progress=let_go)
    assert said == [f"waiting for the trainer (slot 1) to release {run_id}"]
    assert read_workspace(workspace).runs == ()


def test_a_run_whose_orchestrator_lives_is_in_use(workspace: Path, source: Path) -> None:
    run = OutputDir(workspace).run(actions.add_run(workspace, source))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        status = RunStatus(run_id=run.run_id, state="running")
        status.sign(ProcessId.of(child.pid))
        run.status.write_bytes(msgspec.json.encode(status))
        with pytest.raises(ActionError, match=rf"its orchestrator \(pid {child.pid}\)"):
            actions.delete_run(workspace, run.run_id)
        child.communicate(b"\n")
    actions.delete_run(workspace, run.run_id)


@pytest.mark.parametrize("forged", [{"host": "elsewhere", "pid_start": "another-boot/1"}, {}])
def test_a_run_that_claims_an_orchestrator_is_deleted_by_force(
    workspace: Path, source: Path, forged: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = OutputDir(workspace).run(actions.add_run(workspace, source))
    status = RunStatus(run_id=run.run_id, state="running", updated_at=time.time())
    status.sign(ProcessId.of(os.getpid()))  # any process of this account will do
    run.status.write_bytes(msgspec.json.encode(msgspec.structs.replace(status, **forged)))
    words = ["runs", "delete", run.run_id, "--yes", "--output-dir", str(workspace)]
    assert cli.run([*words, "--wait", "0.3"]) == 1 and run.path.exists()
    assert "or, as only its own status file names that, add --force" in " ".join(capsys.readouterr().err.split())
    assert cli.run([*words, "--force"]) == 0 and not run.path.exists()


def test_a_run_whose_status_is_from_the_future_is_deleted_without_a_wait(workspace: Path, source: Path) -> None:
    run = OutputDir(workspace).run(actions.add_run(workspace, source))
    status = RunStatus(run_id=run.run_id, state="running", updated_at=time.time() + 365 * 86_400, pid=1)
    status = msgspec.structs.replace(status, host="elsewhere", pid_start="another-boot/1")
    run.status.write_bytes(msgspec.json.encode(status))
    actions.delete_run(workspace, run.run_id, wait_s=0.0)
    assert not run.path.exists()


def test_force_still_waits_for_what_others_than_the_run_report(
    workspace: Path, source: Path, trainer: StatusWriter
) -> None:
    run_id = actions.add_run(workspace, source, overrides={"sampling": {"max_tokens": 8}})
    trainer.update(runs={run_id: TrainerRunStatus(run_idx=1)}, state="training")
    with pytest.raises(ActionError, match=r"the trainer \(slot 1\) did not release it .*: try again$"):
        actions.delete_run(workspace, run_id, force=True, wait_s=0.3, claimed=False)


def test_an_output_dir_that_cannot_be_written_is_one_line(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ActionError, match=r"adding .*reverse\.toml failed: /.*file.*: Not a directory"):
        actions.add_run(tmp_path / "file" / "workspace", source)


def audit(workspace: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in OutputDir(workspace).audit.read_text().splitlines()]
    assert all(line["who"] and line["time"] > os.stat(workspace).st_ctime - 3600 for line in lines)
    return lines
