"""MultiRunManager: discovery, admission, eviction, hooks, and ranks that follow rank 0."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import nn

from prime_rl.configs.admitted import apply
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.validate import PARSE_ERROR_PREFIX
from prime_rl.contract.files import mark_stable
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import DaemonStatus, RunStatus, Status
from prime_rl.trainer import runs as runs_module
from prime_rl.trainer.runs.discovery import (
    MIN_REPORTS,
    Discovery,
    Evictions,
    Findings,
)
from prime_rl.utils.text import printable
from tests.runs_support import BASE, add, look, manager_of
from tests.trainer_support import write_config


def test_runs_get_the_lowest_free_slot_in_the_order_in_which_they_landed(tmp_path: Path) -> None:
    for run_id, landed in (("run_a", 3), ("run_b", 1), ("run_c", 4), ("run_d", 2)):
        add(tmp_path, run_id, landed)
    manager = look(manager_of(tmp_path))
    assert manager.idx_2_id == {0: "run_b", 1: "run_d"} and manager.id_2_idx == {"run_b": 0, "run_d": 1}
    assert manager.waiting == ["run_a", "run_c"]
    assert manager.used_idxs == {0, 1} and manager.unused_idxs == set()
    assert manager.get_run_dir(1) == tmp_path / "run_d"
    shutil.rmtree(tmp_path / "run_b")
    look(manager)
    assert manager.idx_2_id == {0: "run_a", 1: "run_d"} and manager.waiting == ["run_c"]


def test_a_config_is_resolved_and_scales_its_slot(tmp_path: Path) -> None:
    add(tmp_path, "run_a", model={"lora": {"rank": 8, "alpha": 4}})
    add(tmp_path, "run_b")
    manager = look(manager_of(tmp_path))
    assert manager.scaling_factors == [0.5, 2.0]
    assert (manager.rank_of(0), manager.rank_of(1)) == (8, 16)
    assert manager.config[1].seq_len == 64
    assert manager.get_state_dict_for_run(0)["base_model.model.layer.lora_A.weight"].shape == (8, 6)


def test_an_invalid_config_is_explained_once_and_a_mended_one_is_taken_at_once(tmp_path: Path) -> None:
    run = add(tmp_path, "run_a", optim={"lr": "fast"})
    manager = look(manager_of(tmp_path))
    assert manager.used_idxs == set() and manager.findings.invalid == ["run_a"]
    text = run.config_error.read_text()
    assert text.startswith(PARSE_ERROR_PREFIX) and "optim.lr" in text and "'fast'" in text
    written = run.config_error.stat().st_mtime_ns
    look(manager)
    assert run.config_error.stat().st_mtime_ns == written, "an unchanged file is not judged again"
    write_config(run, BASE)
    look(manager)
    assert manager.id_2_idx == {"run_a": 0} and not run.config_error.exists()


def test_an_unchanged_bad_file_is_parsed_once(tmp_path: Path) -> None:
    add(tmp_path, "run_a")
    manager = manager_of(tmp_path)
    calls = []

    def refuse(config: OrchestratorConfig) -> tuple[bool, str]:
        calls.append(config)
        return False, "not today"

    manager.register_config_validation_hook(refuse)
    for _ in range(3):
        look(manager)
    assert len(calls) == 1
    assert RunDir(tmp_path / "run_a").config_error.read_text().strip().endswith("not today")


def test_a_run_has_its_slot_before_invalid_configs_are_reported(tmp_path: Path) -> None:
    bad = [add(tmp_path, f"run_bad{number}", number + 1, optim={"lr": "fast"}) for number in range(2)]
    add(tmp_path, "run_good", 9)
    manager, seen = manager_of(tmp_path), []
    manager.register_discovered_hook(lambda *_: seen.extend(run.config_error.exists() for run in bad))
    look(manager)
    assert seen == [False, False] and manager.id_2_idx == {"run_good": 0}
    assert all(run.config_error.exists() for run in bad)


def test_many_bad_configs_are_reported_in_slices_and_none_is_forgotten(tmp_path: Path) -> None:
    bad = [add(tmp_path, f"run_{number:03}", optim={"lr": "fast"}) for number in range(2 * MIN_REPORTS + 3)]
    *others, mended, became_a_link, gone = bad
    seconds = itertools.count()  # the disk is slow
    discovery = Discovery(tmp_path, lambda config: None, clock=lambda: float(next(seconds)))

    def find(changed: Collection[Path] | None) -> Findings:
        found = discovery.scan({}, changed)
        discovery.judge(found)
        discovery.report(found)
        return found

    found = find(None)
    assert len(found.invalid) == len(bad) and found.due < next(seconds)
    assert [run for run in bad if run.config_error.exists()] == bad[:MIN_REPORTS]
    shutil.rmtree(gone.path)
    outside = tmp_path / "outside"
    became_a_link.path.rename(outside)
    became_a_link.path.symlink_to(outside)
    write_config(mended, BASE)
    while found.due < math.inf:
        found = find([mended.control])
    assert [run for run in bad if run.config_error.exists()] == others and not RunDir(outside).config_error.exists()
    assert [each.run for each in found.candidates] == [mended]


def test_what_the_trainer_cannot_serve_is_a_config_error(tmp_path: Path) -> None:
    run = add(tmp_path, "run_a", model={"name": "other", "lora": {"rank": 32}}, seq_len=128)
    look(manager_of(tmp_path))
    text = run.config_error.read_text()
    assert text.startswith(PARSE_ERROR_PREFIX)
    for part in ("model.name", "model.lora.rank: found 32", "at most the trainer's 16", "seq_len: found 128"):
        assert part in text


def test_a_half_written_file_is_read_again_when_it_is_whole(tmp_path: Path) -> None:
    run = add(tmp_path, "run_a")
    whole = run.orch_toml.read_text()
    run.orch_toml.write_text(whole[: len(whole) // 2])
    manager = look(manager_of(tmp_path))
    assert manager.used_idxs == set()
    run.orch_toml.write_text(whole)
    assert look(manager).id_2_idx == {"run_a": 0}


def test_links_and_bad_names_are_refused_with_a_reason(tmp_path: Path) -> None:
    workspace, outside = tmp_path / "workspace", tmp_path / "outside"
    workspace.mkdir()
    add(outside, "run_real")
    (workspace / "run_link").symlink_to(outside / "run_real")
    (workspace / "run_bad name").mkdir()
    (workspace / "run_.5").mkdir()
    run = add(workspace, "run_a")
    run.rollouts.rmdir()
    run.rollouts.symlink_to(outside)
    manager = look(manager_of(workspace))
    assert manager.used_idxs == set()
    assert "symbolic link" in manager.findings.refused["run_link"]
    assert "invalid run id" in manager.findings.refused["run_bad name"]
    assert "rollouts is a symbolic link" in manager.findings.refused["run_a"]
    assert manager.findings.unconfigured == ["run_.5"]


def test_the_older_place_of_the_config_is_read(tmp_path: Path) -> None:
    run = add(tmp_path, "run_a")
    (run.path / "configs").mkdir()
    run.orch_toml.rename(run.path / "configs" / "orch.toml")
    assert look(manager_of(tmp_path)).id_2_idx == {"run_a": 0}


def test_evict_and_readmit(tmp_path: Path) -> None:
    run = add(tmp_path, "run_a", landed=5)
    manager = look(manager_of(tmp_path, max_runs=1))
    manager.evict_run(0, "used too\nmuch memory")
    assert run.evicted.read_text() == "used too much memory"
    assert manager.used_idxs == {0} and manager.active == [] and manager.needs_discovery
    add(tmp_path, "run_b", landed=6)
    look(manager)
    assert manager.id_2_idx == {"run_b": 0} and manager.findings.evicted == ["run_a"] and not manager.needs_discovery
    run.evicted.unlink()
    look(manager)
    assert manager.waiting == ["run_a"]


@pytest.mark.parametrize("who", ["orchestrator", "supervisor"])
def test_a_failed_run_leaves_its_slot_to_the_next_one_until_it_is_readmitted(tmp_path: Path, who: str) -> None:
    run = add(tmp_path, "run_a", 1)
    add(tmp_path, "run_b", 2)
    manager = look(manager_of(tmp_path, max_runs=1))
    path = run.status if who == "orchestrator" else OutputDir(tmp_path).daemon_status("run_a")
    path.parent.mkdir(exist_ok=True)
    word: Status = RunStatus(run_id="run_a", state="failed", reason="the environment broke")
    if who == "supervisor":
        word = DaemonStatus(name="run_a", state="failed", reason="3 early crashes")
    path.write_bytes(msgspec.json.encode(word))
    assert look(manager).idx_2_id == {0: "run_b"}
    assert manager.findings.failed == ["run_a"] and manager.waiting == []
    path.unlink()
    assert look(manager).waiting == ["run_a"]


def test_a_finished_run_leaves_and_does_not_come_back(tmp_path: Path) -> None:
    run = add(tmp_path, "run_a", max_steps=3)
    manager = look(manager_of(tmp_path))
    run.broadcast_dir(3).mkdir(parents=True)
    (run.broadcast_dir(3) / "STABLE").touch()
    manager.finish_run(manager.run(0))
    look(manager)
    assert manager.used_idxs == set() and manager.findings.finished == ["run_a"]
    write_config(run, BASE, max_steps=4)
    assert look(manager).id_2_idx == {}, "an edit is not in effect"
    apply(run, run.orch_toml.read_text())
    assert look(manager).id_2_idx == {"run_a": 0} and manager.run(0).config.max_steps == 4


def test_a_folder_that_was_replaced_is_another_run(tmp_path: Path) -> None:
    add(tmp_path, "run_a")
    manager = look(manager_of(tmp_path))
    deleted: list[str] = []
    manager.register_deletion_hook(lambda idx, run_id: deleted.append(run_id))
    (tmp_path / "run_a").rename(tmp_path / "old")
    add(tmp_path, "run_a")
    look(manager)
    assert deleted == ["run_a"] and manager.id_2_idx == {"run_a": 0}


def test_hooks_are_called_in_order_and_deletion_comes_before_creation(tmp_path: Path) -> None:
    add(tmp_path, "run_a", landed=1)
    manager = manager_of(tmp_path, max_runs=1)
    calls: list[tuple[Any, ...]] = []

    def record(kind: str) -> Callable[..., None]:
        return lambda run_idx, run_id, *rest: calls.append((kind, run_idx, run_id))

    manager.register_creation_hook(record("creation 1"))
    manager.register_creation_hook(record("creation 2"))
    manager.register_deletion_hook(record("deletion 1"))
    manager.register_deletion_hook(record("deletion 2"))
    manager.register_discovered_hook(record("discovered"))
    manager.register_forgotten_hook(record("forgotten"))
    look(manager)
    assert calls == [("discovered", 0, "run_a"), ("creation 1", 0, "run_a"), ("creation 2", 0, "run_a")]
    calls.clear()
    add(tmp_path, "run_b", landed=2)
    manager.evict_run(0, "test")
    look(manager)
    assert calls == [
        ("forgotten", 0, "run_a"),
        ("discovered", 0, "run_b"),
        ("deletion 1", 0, "run_a"),
        ("deletion 2", 0, "run_a"),
        ("creation 1", 0, "run_b"),
        ("creation 2", 0, "run_b"),
    ]


@pytest.mark.parametrize("kind", ["discovered", "creation"])
def test_a_hook_that_raises_evicts_that_run_only(tmp_path: Path, kind: str) -> None:
    bad, good = add(tmp_path, "run_a", landed=1), add(tmp_path, "run_b", landed=2)
    manager = manager_of(tmp_path)
    deleted: list[str] = []

    def hook(run_idx: int, run_id: str, *config: object) -> None:
        if run_id == "run_a":
            raise KeyError("no such thing")

    manager.register_deletion_hook(lambda idx, run_id: deleted.append(run_id))
    {"discovered": manager.register_discovered_hook, "creation": manager.register_creation_hook}[kind](hook)
    look(manager)
    assert set(manager.id_2_idx) == {"run_b"} and "KeyError: 'no such thing'" in bad.evicted.read_text()
    assert not good.evicted.exists()
    assert deleted == ([] if kind == "discovered" else ["run_a"])
    assert not manager.has_changes


def test_a_slot_starts_empty_for_the_next_run(tmp_path: Path) -> None:
    add(tmp_path, "run_a", landed=1)
    manager = look(manager_of(tmp_path, max_runs=1))
    fresh = manager.get_state_dict_for_run(0)
    for _, parameter in manager.get_named_parameters_for_run(0):
        nn.init.constant_(parameter, 7.0)
        parameter.grad = parameter.detach().clone()
    manager.progress[0].step = 5
    manager.ready_to_update[0] = True
    shutil.rmtree(tmp_path / "run_a")
    add(tmp_path, "run_b", landed=2)
    look(manager)
    assert manager.id_2_idx == {"run_b": 0} and manager.progress[0].step == 0 and not manager.ready_to_update_idxs
    for name, tensor in manager.get_state_dict_for_run(0).items():
        assert (tensor == fresh[name]).all(), "same seed, same start"
    assert all(parameter.grad is None for _, parameter in manager.get_named_parameters_for_run(0))


def test_a_fault_inside_a_boundary_evicts_and_a_deleted_folder_is_not_made_again(tmp_path: Path) -> None:
    run = add(tmp_path, "run_a", landed=1)
    add(tmp_path, "run_b", landed=2)
    manager = look(manager_of(tmp_path))
    with manager.run_boundary(manager.run(0), "publishing version 1"):
        raise OSError(28, "No space left on device", "x")
    assert "publishing version 1 failed" in run.evicted.read_text() and "No space left" in run.evicted.read_text()
    shutil.rmtree(tmp_path / "run_b")
    with manager.run_boundary(manager.run(1), "publishing version 1"):
        raise FileNotFoundError("gone")
    assert not (tmp_path / "run_b").exists()
    assert look(manager).used_idxs == set()


def test_an_eviction_whose_reason_cannot_be_written_holds_all_the_same(tmp_path: Path) -> None:
    run = add(tmp_path, "run_a")
    manager = look(manager_of(tmp_path))
    shutil.rmtree(run.control)
    run.control.write_text("a file in the place of the folder")
    manager.evict_run(0, "bad batch")
    look(manager)
    assert manager.used_idxs == set() and manager.needs_discovery
    run.control.unlink()
    run.control.mkdir()
    write_config(run, BASE)
    look(manager)
    assert manager.used_idxs == set() and run.evicted.read_text() == "bad batch"


def test_names_of_all_versions_of_the_interface(tmp_path: Path) -> None:
    manager = runs_module.setup_runs(tmp_path, 3)
    assert runs_module.get_multi_run_manager() is runs_module.get_runs() is manager
    assert isinstance(manager, runs_module.Runs) and manager.max_runs == 3
    manager.check_for_changes()
    manager.sync_runs()
    runs_module.check_for_changes()
    runs_module.sync_runs()
    assert manager.run_dirs() == []


VALID = f'batch_size = 8\nrollouts_per_example = 4\nmodel.name = "{BASE}"\n[[env]]\nid = "reverse-text"\n'


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 20_000,
        f"{VALID}args{'.a' * 300} = 1\n",
        "batch_size = " + "9" * 5_000,
        "#" * (2 << 20),
        "".join(f"key{number} = 1\n" for number in range(50_000)),
    ],
    ids=["nested", "nested in what is free", "digits", "large", "wrong all over"],
)
def test_a_hostile_config_is_invalid_and_harms_no_other_run(tmp_path: Path, text: str) -> None:
    run = add(tmp_path, "run_a")
    add(tmp_path, "run_b")
    run.orch_toml.write_text(text)
    manager = look(manager_of(tmp_path))
    assert set(manager.id_2_idx) == {"run_b"} and manager.findings.invalid == ["run_a"]
    assert run.config_error.read_text().startswith(PARSE_ERROR_PREFIX)


def test_a_resume_request_without_end_and_numbers_that_are_none_keep_no_run_from_its_slot(tmp_path: Path) -> None:
    add(tmp_path, "run_a", env=[{"id": "reverse-text", "args": {"a": math.nan}}])
    run = add(tmp_path, "run_b", max_steps=1, ckpt={"resume_step": 0})
    run.broadcast_dir(1).mkdir(parents=True)
    mark_stable(run.broadcast_dir(1))
    run.resumed.write_text('{"x": ' + "[" * 20_000)
    assert set(look(manager_of(tmp_path)).id_2_idx) == {"run_a", "run_b"}


def test_a_name_that_is_no_text_can_be_told(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"run_\xff")).mkdir()
    manager = look(manager_of(tmp_path))
    assert [printable(name) for name in manager.findings.refused] == ["run_\\udcff"]


def test_a_reason_is_one_line_of_bounded_length(tmp_path: Path) -> None:
    run = add(tmp_path, "run_a")
    look(manager_of(tmp_path)).evict_run(0, "bad\n\udcff " + "x" * 10_000)
    assert run.evicted.read_text().startswith("bad \\udcff xxx") and len(run.evicted.read_text()) == 2_000


def test_the_reason_of_a_run_that_is_gone_is_not_kept(tmp_path: Path) -> None:
    run, evictions = add(tmp_path, "run_a"), Evictions(tmp_path)
    for run_id in ("run_a", "run_gone"):
        evictions.add(run_id, "too loud")
    assert evictions.unwritten == {} and run.evicted.read_text() == "too loud"
    assert not (tmp_path / "run_gone").exists()
