"""What a run trains with is what is shown: edits of `orch.toml` before and after a restart of the trainer."""

from __future__ import annotations

import json
import os
import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w

from daemons import actions
from daemons.actions import rollback_run, set_run_keys
from daemons.adding import checked, fork_run
from daemons.cli import run as prl
from daemons.details import change_texts, changes_of, diff_runs, read_details, told_config
from daemons.errors import ActionError
from daemons.exports import export_run
from daemons.halving import Halving
from daemons.observe import Observer
from daemons.ranking import compared_config, read_contestants
from daemons.specs import INFERENCE, MONITORS
from daemons.workspace import RunView
from daemons.workspace_reader import read_workspace
from prime_rl.configs.admitted import (
    HIDDEN,
    MAX_CHANGE_CHARS,
    MAX_CHANGES,
    apply,
    config_in_effect,
    in_words,
    read_effect,
    short,
    write_admitted,
)
from prime_rl.configs.base import MAX_TOML_BYTES, ConfigError, dump_toml, load_toml, parse_toml
from prime_rl.configs.validate import find_problems
from prime_rl.contract import files
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.notes import MAX_ADMITTED_BYTES, Admission, Change, pending_request, read_admitted
from prime_rl.contract.status import RunState, RunStatus, StatusWriter, TrainerRunStatus, TrainerStatus
from prime_rl.orchestrator.orchestrator import find_run, read_config
from prime_rl.results import Workspace
from prime_rl.trainer.runs import MultiRunManager
from tests.runs_support import BASE, add, look, manager_of
from tests.trainer_support import write_config
from tests.unit.test_daemons_forks import put_version
from tui.actions import find_templates
from tui.model.snapshot import make_snapshot
from tui.readers.compare import CompareReader, CompareRequest
from tui.readers.run_config import ConfigReader, ConfigRequest


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that a trainer has admitted with an lr of 0.0015."""
    found = add(tmp_path, "run_a", optim={"lr": 0.0015}, max_steps=25)
    look(manager_of(tmp_path))
    return found


def edit(run: RunDir, **changes: Any) -> None:
    """A person writes the file again."""
    write_config(run, BASE, **{"optim": {"lr": 0.0015}, "max_steps": 25, **changes})


def view(run: RunDir) -> RunView:
    found = read_workspace(run.path.parent).run(run.run_id)
    assert found is not None
    return found


def restarted(run: RunDir) -> MultiRunManager:
    return look(manager_of(run.path.parent))


def test_an_edit_is_not_in_effect_before_and_after_a_restart_and_every_reader_shows_what_is(
    run: RunDir, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace, output = run.path.parent, OutputDir(run.path.parent)
    add(workspace, "run_b", optim={"lr": 0.0015}, max_steps=25)
    put_version(run, 1)
    edit(run, optim={"lr": 0.01})
    cure = "prl runs apply run_a (pause it first), or prl runs restore run_a"
    sentence = f"edited, not in effect: optim.lr 0.0015 -> 0.01: {cure}"
    for _ in range(2):
        manager = restarted(run)
        assert manager.run(0).config.optim.lr == 0.0015
        assert read_config(find_run(argv := ["@", str(run.orch_toml)]), argv).optim.lr == 0.0015
        assert view(run).edited == sentence and sentence in view(run).why
        assert (view(run).lr, view(run).max_steps) == (0.0015, 25)
        details = read_details(run, view(run), None)
        assert details.config is not None and details.config["optim"]["lr"] == 0.0015
        assert diff_runs(workspace, "run_a", "run_b").config == ()
        data, _ = ConfigReader(workspace, "run_a").read(ConfigRequest())
        assert data is not None and data.text is not None and "lr = 0.0015" in data.text and data.edited == sentence
        values, _ = ConfigReader(workspace, "run_a").read(ConfigRequest(wants_all=True))
        assert values is not None and values.values is not None
        assert [each.text for each in values.values if each.key == "optim.lr"] == ["0.0015"]
        compared = CompareReader(workspace)
        compared._open("run_a")
        compared._read_config("run_a")
        assert compared._configs["run_a"][1]["optim.lr"] == "0.0015"
        ranked = read_contestants(workspace, read_workspace(workspace).runs, "reward/mean")
        assert {each.config["optim.lr"] for each in ranked} == {"0.0015"}
        assert Workspace(workspace).run("run_a").config["optim"]["lr"] == 0.0015
        card = export_run(workspace, "run_a", tmp_path_factory.mktemp("out") / "adapter").out / "README.md"
        assert "lr = 0.0015" in card.read_text() and "0.01" not in card.read_text()
        [problem] = make_snapshot(found := read_workspace(workspace), {}, found.read_at).problems
        assert (problem.name, problem.text) == ("run_a", sentence)
        for words in (["status"], ["runs", "list"], ["runs", "show", "run_a"]):
            assert prl([*words, "--output-dir", str(workspace)]) == 0
            assert "edited, not in effect: optim.lr 0.0015 -> 0.01" in capsys.readouterr().out, words
        fork = fork_run(workspace, "run_a")
        assert load_toml(output.run(fork.run_id).orch_toml)["optim"]["lr"] == 0.0015
        actions.delete_run(workspace, fork.run_id)


def test_an_edited_max_steps_ends_no_run_and_moves_no_rung(run: RunDir) -> None:
    workspace = run.path.parent
    put_version(run, 10)
    status = TrainerStatus(state="training", max_runs=1, runs={"run_a": TrainerRunStatus(run_idx=0, step=10)})
    writer = StatusWriter(OutputDir(workspace).trainer_status, status)
    StatusWriter(run.status, RunStatus(run_id="run_a", state="running", step=10)).close(state="finished")
    edit(run, max_steps=5)
    seen = Observer(OutputDir(workspace)).runs([])["run_a"]
    known = Halving(OutputDir(workspace))._fact("run_a")
    assert known is not None and (seen.max_steps, known[1], known[0].is_over) == (25, 25, False)
    assert view(run).max_steps == 25 and view(run).state is RunState.ACTIVE
    writer.close(state="stopped", runs={})


def test_what_the_trainer_admits_is_written_once_and_a_comment_is_no_edit(run: RunDir) -> None:
    admitted = read_admitted(run)
    assert admitted is not None and (admitted.run_id, admitted.step, admitted.history) == ("run_a", 0, [])
    assert admitted.text == run.orch_toml.read_text()
    run.orch_toml.write_text(f"# mine\n{run.orch_toml.read_text()}")
    restarted(run)
    assert read_admitted(run) == admitted and read_effect(run).edit is None and view(run).edited is None


def test_a_run_of_an_older_version_gets_its_config_written_down(run: RunDir) -> None:
    run.admitted.unlink()
    edit(run, optim={"lr": 0.01})
    assert view(run).edited is None and config_in_effect(run).optim.lr == 0.01
    restarted(run)
    edit(run, optim={"lr": 0.02})
    assert config_in_effect(run).optim.lr == 0.01


@pytest.mark.parametrize("text", ["half =", "batch_size = 'many'", ""])
def test_an_invalid_edit_is_the_runs_problem_and_it_goes_on(run: RunDir, text: str) -> None:
    manager = manager_of(run.path.parent)
    look(manager)
    run.orch_toml.write_text(text)
    look(manager)
    for each in (manager, restarted(run)):
        assert each.id_2_idx == {"run_a": 0} and each.run(0).config.max_steps == 25
    now = view(run)
    assert now.state is not RunState.INVALID and now.max_steps == 25 and not run.config_error.exists()
    assert (now.edited or "").startswith("edited, not in effect: orch.toml is invalid (")
    with pytest.raises(ActionError, match="invalid"):
        actions.apply_edit(run.path.parent, "run_a")
    assert "restored" in actions.restore_config(run.path.parent, "run_a")
    assert view(run).edited is None and load_toml(run.orch_toml)["max_steps"] == 25


def test_what_a_run_puts_in_the_place_of_its_admitted_config_ends_no_trainer(run: RunDir) -> None:
    manager, admitted = restarted(run), read_admitted(run)
    assert admitted is not None
    run.applied.write_text(run.orch_toml.read_text())
    hostile = msgspec.structs.replace(admitted, text="a = " + "9" * 5_000)
    run.admitted.write_bytes(msgspec.toml.encode(hostile))
    edit(run, weight=3.0)
    look(manager)
    assert manager.run(0).config.weight == 3.0


def test_the_largest_config_is_admitted_and_more_of_a_history_than_is_kept_is_not_looked_through(run: RunDir) -> None:
    many, long = ([(str(key), "\x01" * size, "é" * size) for key in range(1000)] for size in (1, 2000))
    kept = [Change(0.0, 1, short(keys)) for keys in (many, long)]
    assert all(change.keys and len(in_words(change.keys)) <= MAX_CHANGE_CHARS for change in kept)
    change = max(kept, key=lambda change: len(tomli_w.dumps(msgspec.to_builtins(change))))
    largest = Admission("run_a", 0.0, 0, "", '"' * MAX_TOML_BYTES, [change] * MAX_CHANGES)
    assert len(tomli_w.dumps(msgspec.to_builtins(largest), multiline_strings=True)) <= MAX_ADMITTED_BYTES
    early, late = Change(0.0, 1, [("seed", "3", "1")]), Change(0.0, 1, [("seed", "1", "2")])
    run.admitted.write_bytes(msgspec.toml.encode(Admission("run_a", 0.0, 0, "", "", [early, *[late] * MAX_CHANGES])))
    assert changes_of(run) == [late] * MAX_CHANGES


ESCAPED = "\\" * 200_000
TOO_LARGE = f"would have over {MAX_TOML_BYTES} bytes when it is written back, with its escapes: shorten its texts"


def prompted(system: str, **changes: Any) -> dict[str, Any]:
    return {"optim": {"lr": 0.0015}, "env": [{"id": "reverse-text", "prompt": {"system": system}}], **changes}


def put_literally(run: RunDir, system: str, **changes: Any) -> str:
    """Write a prompt without escapes, as TOML's literal strings have it; returns the text of the file."""
    write_config(run, BASE, **prompted("PROMPT", **changes))
    text = run.orch_toml.read_text().replace('"PROMPT"', f"'{system}'")
    run.orch_toml.write_text(text)
    return text


def test_a_config_that_cannot_be_written_back_is_refused_before_it_is_admitted(tmp_path: Path, run: RunDir) -> None:
    new = add(tmp_path, "run_b")
    put_literally(new, ESCAPED)
    manager = restarted(new)
    assert manager.id_2_idx == {"run_a": 0} and TOO_LARGE in new.config_error.read_text()
    with pytest.raises(ConfigError, match=TOO_LARGE):
        checked(tmp_path, load_toml(new.orch_toml), "orch.toml", None, new.data_file)
    assert TOO_LARGE in str(find_problems(load_toml(new.orch_toml), "orch.toml", None)[0])
    put_literally(run, ESCAPED, max_steps=30)
    look(manager)
    assert TOO_LARGE in (view(run).edited or "") and config_in_effect(run).max_steps == 25


def test_live_keys_that_make_the_config_too_large_with_what_is_in_effect_are_the_edits_problem(run: RunDir) -> None:
    rest = len(tomli_w.dumps({**load_toml(run.orch_toml), **prompted("", max_steps=25)}))
    write_config(run, BASE, **prompted("x" * (MAX_TOML_BYTES - rest - 500), max_steps=25))
    actions.apply_edit(run.path.parent, "run_a")
    manager = restarted(run)
    edit(run, tags=["x" * 60] * 10)
    look(manager)
    assert TOO_LARGE in (view(run).edited or "") and view(run).state is not RunState.INVALID
    assert config_in_effect(run).env[0].prompt.system and manager.run(0).config.tags == []
    assert restarted(run).id_2_idx == {"run_a": 0}


def test_a_config_that_an_older_version_admitted_stays_valid_however_many_escapes_it_has(run: RunDir) -> None:
    admitted, text = read_admitted(run), put_literally(run, ESCAPED, max_steps=25)
    assert admitted is not None
    before = msgspec.structs.replace(admitted, text=text)
    run.admitted.write_text(tomli_w.dumps(msgspec.to_builtins(before), multiline_strings=True))
    put_literally(run, ESCAPED, max_steps=25, weight=3.0)
    manager = restarted(run)
    assert manager.id_2_idx == {"run_a": 0} and manager.run(0).config.env[0].prompt.system == ESCAPED
    assert TOO_LARGE in (view(run).edited or "") and config_in_effect(run).weight == 1
    assert read_admitted(run) is not None


def test_a_config_that_would_grow_without_end_is_not_written_to_its_end(run: RunDir) -> None:
    """A list of tables behind a long name, which stands before each of them: a gigabyte."""
    items = ", ".join(["{ a = '" + "x" * 100 + "' }", *["{}"] * 5000])
    extra = f"{'k' * 150_000}.l = [{items}]"
    data = {**load_toml(run.orch_toml), "more": parse_toml(extra, "orch.toml")}
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=TOO_LARGE):
            dump_toml(data, "orch.toml")
        assert tracemalloc.get_traced_memory()[1] < 20 * MAX_TOML_BYTES
    finally:
        tracemalloc.stop()


def test_apply_takes_the_edit_at_the_next_admission_and_keeps_a_history(run: RunDir) -> None:
    edit(run, optim={"lr": 0.01}, max_steps=30)
    assert actions.apply_edit(run.path.parent, "run_a", reason="faster") == (
        "run_a: applied max_steps 25 -> 30, optim.lr 0.0015 -> 0.01"
    )
    assert view(run).edited is None and view(run).max_steps == 30
    assert restarted(run).run(0).config.optim.lr == 0.01
    admitted = read_admitted(run)
    assert admitted is not None and not run.applied.exists()
    assert [change.keys for change in admitted.history] == [[("max_steps", "25", "30"), ("optim.lr", "0.0015", "0.01")]]
    lines = [json.loads(line) for line in OutputDir(run.path.parent).audit.read_text().splitlines()]
    assert [(line["action"], line["reason"]) for line in lines] == [("apply", "faster")]
    assert "nothing to apply" in actions.apply_edit(run.path.parent, "run_a")


def test_what_is_fixed_by_the_first_step_can_change_before_it(run: RunDir) -> None:
    edit(run, model={"name": str(BASE), "lora": {"rank": 2}})
    assert actions.apply_edit(run.path.parent, "run_a").startswith("run_a: applied model.")
    assert restarted(run).run(0).config.model.lora.rank == 2


def test_an_edit_that_names_an_adapter_which_the_run_has_no_copy_of_changes_nothing(run: RunDir) -> None:
    edit(run, kind="distill", teacher="run_c@v2", max_steps=30)
    words = "teacher: run_a has no copy of run_c@v2, it is copied when a run is added: prl runs fork run_a --set"
    with pytest.raises(ActionError, match=re.escape(words)):
        actions.apply_edit(run.path.parent, "run_a")
    assert not run.applied.exists() and config_in_effect(run).kind == "rl" and config_in_effect(run).max_steps == 25
    run.teacher_dir(0).mkdir(parents=True)
    run.teacher_source(0).write_text("run_c@v2")
    assert "teacher" in actions.apply_edit(run.path.parent, "run_a")
    assert restarted(run).run(0).config.kind == "distill"


def test_a_run_that_takes_a_slot_while_an_edit_is_applied_keeps_its_config(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = TrainerStatus(state="training", max_runs=1, runs={"run_a": TrainerRunStatus(run_idx=0)})
    writers: list[StatusWriter] = []

    def applied(run: RunDir, text: str) -> None:
        apply(run, text)
        writers.append(StatusWriter(OutputDir(run.path.parent).trainer_status, status))

    monkeypatch.setattr(actions, "apply", applied)
    edit(run, optim={"lr": 0.01})
    with pytest.raises(ActionError, match="run_a took a slot meanwhile: pause it first"):
        actions.apply_edit(run.path.parent, "run_a")
    assert not run.applied.exists() and config_in_effect(run).optim.lr == 0.0015
    writers[0].close(state="stopped", runs={})


def test_a_key_that_changed_while_the_run_trained_is_compared_with_all_that_it_was(run: RunDir) -> None:
    """Else a result is credited to a learning rate that came after it."""
    admitted = restarted(run) and read_admitted(run)
    assert admitted is not None
    keys = {
        0: [("seed", "0", "1")],
        20: [("optim.lr", "0.001", "0.002"), ("seed", "1", "2")],
        29: [("optim.lr", "0.002", "0.0015")],
    }
    history = [Change(0.0, step, changed) for step, changed in keys.items()]
    run.admitted.write_bytes(msgspec.toml.encode(msgspec.structs.replace(admitted, history=history)))
    [found] = read_contestants(run.path.parent, [view(run)], "reward/mean")
    assert (found.config["optim.lr"], found.config["seed"]) == ("0.001 -> 0.002 -> 0.0015", "1 -> 42")
    assert found.config["max_steps"] == "25"


def test_a_change_of_the_config_is_told_by_every_reader_from_when_it_is_applied(
    run: RunDir, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both runs have one config now, and trained with different ones."""
    workspace, out = run.path.parent, tmp_path_factory.mktemp("out")
    add(workspace, "run_b", optim={"lr": 0.01}, max_steps=25)
    for step in (5, 10):
        put_version(run, step)
    edit(run, optim={"lr": 0.01})
    actions.apply_edit(workspace, "run_a")
    told, sentence = "0.0015 -> 0.01", "after step 10: optim.lr 0.0015 -> 0.01"
    for name in ("applied", "admitted"):
        assert run.applied.exists() is (name == "applied")
        assert read_details(run, view(run), None).changes == (sentence,)
        assert [(row.name, row.values) for row in diff_runs(workspace, "run_a", "run_b").config] == [
            ("optim.lr", (told, 0.01))
        ]
        data, _ = ConfigReader(workspace, "run_a").read(ConfigRequest(other="run_b"))
        assert data is not None and data.changes == (sentence,)
        assert [(row.name, row.values) for row in data.differences] == [("optim.lr", (told, 0.01))]
        [ranked, _] = read_contestants(workspace, read_workspace(workspace).runs, "reward/mean")
        assert ranked.config["optim.lr"] == told
        compared, _ = CompareReader(workspace).read(CompareRequest((("run_a", (), 10), ("run_b", (), 0))))
        assert compared is not None and compared.keys == ("optim.lr",)
        assert Workspace(workspace).run("run_a").changes == [sentence]
        card = export_run(workspace, "run_a", out / name, step=5).out / "README.md"
        assert f"this is the version after step 5:\n\n```\n{sentence}" in card.read_text()
        assert prl(["runs", "show", "run_a", "--output-dir", str(workspace)]) == 0
        assert sentence in capsys.readouterr().out
        assert prl(["runs", "show", "run_a", "--json", "--output-dir", str(workspace)]) == 0
        assert json.loads(capsys.readouterr().out)["changes"] == [sentence]
        write_admitted(run, read_effect(run), 10)
    put_version(run, 11)
    assert sentence in (export_run(workspace, "run_a", out / "v11").out / "README.md").read_text()


def test_the_step_of_a_live_change_is_the_trainers_and_a_look_has_one_admitted_config(run: RunDir) -> None:
    """Else two looks told two steps, and one that began before an admission told the change the other way round."""
    assert restarted(run)
    for step in (5, 10):
        put_version(run, step)
    before = read_effect(run)
    edit(run, weight=3.0)
    assert change_texts(run) == () and told_config(run, read_effect(run))["weight"] == 3.0
    write_admitted(run, read_effect(run), 7)
    assert change_texts(run) == ("after step 7: weight 1.0 -> 3.0",)
    assert changes_of(run, before) == [] and told_config(run, before)["weight"] == 1.0


def test_a_look_of_compare_opens_each_file_of_a_run_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert restarted(run)
    put_version(run, 5)
    edit(run, weight=3.0)
    opened, open_file = list[Path](), files.open_file

    def counted(path: Path, **settings: Any) -> int:
        opened.append(path)
        return open_file(path, **settings)

    monkeypatch.setattr(files, "open_file", counted)
    data, _ = CompareReader(run.path.parent).read(CompareRequest((("run_a", (), 5),)))
    assert data is not None and {run.admitted, run.orch_toml} <= set(opened)
    assert len(opened) == len(set(opened))


def test_a_change_holds_from_where_the_run_went_back_to(run: RunDir) -> None:
    admitted = read_admitted(run)
    assert admitted is not None
    keys = {86: [("env.0.args.max_len", "4", "8")], 20: [("ckpt.resume_step", "-1", "20")]}
    history = [Change(0.0, step, changed) for step, changed in keys.items()]
    run.admitted.write_bytes(msgspec.toml.encode(msgspec.structs.replace(admitted, history=history)))
    assert change_texts(run) == (
        "after step 20: env.0.args.max_len 4 -> 8",
        "after step 20: ckpt.resume_step -1 -> 20",
    )
    assert told_config(run, read_effect(run))["env.0.args.max_len"] == "4 -> unset"


def test_a_change_tells_texts_of_any_form_and_no_secret(run: RunDir) -> None:
    """Neither of a long text before it, nor of a list around it, nor of its own line breaks and commas."""
    long = "one, two -> three\n" * 200
    secret = {"judge_api_key": "sk-\none, two", "keys": [["a", {"api_key": "sk-1"}]]}
    put_version(run, 5)
    for asked in ({"system_prompt": long, **secret}, {"system_prompt": "b -> c", "judge_api_key": "sk-2"}):
        edit(run, env=[{"id": "plugin:judged", "args": asked}])
        apply(run, run.orch_toml.read_text())
        write_admitted(run, read_effect(run), 5)
    texts = change_texts(run)
    assert "env.0.args.system_prompt unset -> one, two -> three" in texts[0] and len(texts[0]) <= MAX_CHANGE_CHARS
    assert texts[1].startswith("after step 5: env.0.args.system_prompt one, two -> three") and "-> b -> c" in texts[1]
    assert "sk-" not in run.admitted.read_text().partition("[[history]]")[2] and "sk-" not in str(texts)
    effect = read_effect(run)
    assert told_config(run, effect)["env.0.args.system_prompt"].endswith("-> b -> c")
    assert "sk-" not in str(compared_config(run))


def test_values_with_the_name_of_a_secret_are_hidden_and_still_compared(run: RunDir) -> None:
    add(run.path.parent, "run_b", env=[{"id": "plugin:p", "args": {"stop_token": "<0>"}}])
    add(run.path.parent, "run_c", env=[{"id": "plugin:p", "args": {"stop_token": "<1>"}}])
    one, other = (
        compared_config(RunDir(run.path.parent / name))["env.0.args.stop_token"] for name in ("run_b", "run_c")
    )
    assert one != other and one.startswith(HIDDEN) and "<" not in one + other


@pytest.mark.parametrize("step", ["0x" + "f" * 5000, "-1", str(2**60)])
def test_an_admission_after_a_step_that_no_run_reaches_is_none(run: RunDir, step: str) -> None:
    admitted = restarted(run) and read_admitted(run)
    assert admitted is not None
    changed = msgspec.structs.replace(admitted, history=[Change(0.0, 7, [("seed", "1", "2")])])
    text = msgspec.toml.encode(changed).decode()
    assert "step = 7" in text
    run.admitted.write_text(text.replace("step = 7", f"step = {step}"))
    assert read_admitted(run) is None and change_texts(run) == ()
    assert read_details(run, view(run), None).changes == ()


def test_a_new_run_is_not_offered_an_edit_that_is_not_in_effect(run: RunDir) -> None:
    def offered() -> bool:
        return "run_a" in [each.label for each in find_templates(run.path.parent, ["run_a"])]

    assert offered()
    for text in (run.orch_toml.read_text().replace("0.0015", "0.01"), "half ="):
        run.orch_toml.write_text(text)
        assert not offered()
        actions.restore_config(run.path.parent, "run_a")
        assert offered()


def test_apply_refuses_by_key_what_cannot_change_now(run: RunDir) -> None:
    output = OutputDir(run.path.parent)
    status = TrainerStatus(state="training", max_runs=1, runs={"run_a": TrainerRunStatus(run_idx=0, step=3)})
    writer = StatusWriter(output.trainer_status, status)
    edit(run, optim={"lr": 0.01}, weight=2.0)
    with pytest.raises(ActionError, match=r"^run_a: not applied: optim.lr: not while it is in its slot"):
        actions.apply_edit(output.path, "run_a")
    assert not run.applied.exists() and config_in_effect(run).weight == 2.0, "that is in effect by itself"
    writer.close(state="stopped", runs={})
    put_version(run, 3)
    edit(run, optim={"lr": 0.01}, model={"name": str(BASE), "lora": {"rank": 2}})
    with pytest.raises(ActionError, match=r"applied optim.lr 0.0015 -> 0.01; not applied: model.lora.rank: fixed"):
        actions.apply_edit(output.path, "run_a")
    config = restarted(run).run(0).config
    assert (config.optim.lr, config.model.lora.rank) != (0.01, 2) and config.optim.lr == 0.01
    assert "model.lora.rank" in (view(run).edited or "") and "optim.lr" not in (view(run).edited or "")


def test_restore_brings_the_text_back_as_it_was(run: RunDir) -> None:
    run.orch_toml.chmod(0o600)
    before = run.orch_toml.read_text()
    edit(run, optim={"lr": 0.01})
    run.orch_toml.chmod(0o600)
    actions.restore_config(run.path.parent, "run_a", reason="by mistake")
    [line] = [json.loads(line) for line in OutputDir(run.path.parent).audit.read_text().splitlines()]
    assert (line["action"], line["reason"], line["detail"]) == ("restore", "by mistake", "optim.lr 0.01 -> 0.0015")
    assert run.orch_toml.read_text() == before and run.orch_toml.stat().st_mode & 0o777 == 0o600
    assert "nothing to restore" in actions.restore_config(run.path.parent, "run_a")


def test_secrets_of_an_edit_are_hidden(run: RunDir) -> None:
    edit(run, env=[{"id": "reverse-text", "args": {"api_key": "abc-123"}}])
    assert "api_key" in (view(run).edited or "") and "abc-123" not in (view(run).edited or "")


def test_live_keys_of_an_edit_are_taken_at_once_and_written_down(run: RunDir) -> None:
    manager = restarted(run)
    edit(run, weight=3.0, optim={"lr": 0.01})
    look(manager)
    assert (manager.run(0).config.weight, manager.run(0).config.optim.lr) == (3.0, 0.0015)
    admitted = read_admitted(run)
    assert admitted is not None and [change.keys for change in admitted.history] == [[("weight", "1.0", "3.0")]]
    assert "weight" not in (view(run).edited or "") and view(run).weight == 3.0


def test_set_and_rollback_are_in_effect_and_refuse_what_is_edited(run: RunDir) -> None:
    workspace = run.path.parent
    assert set_run_keys(workspace, "run_a", {"max_steps": 40})
    assert view(run).max_steps == 40 and view(run).edited is None
    assert restarted(run).run(0).config.max_steps == 40
    rollback_run(workspace, "run_a", 0)
    assert pending_request(run, config_in_effect(run).ckpt.resume_step) is not None and view(run).edited is None
    edit(run, optim={"lr": 0.01})
    for act in (
        lambda: set_run_keys(workspace, "run_a", {"max_steps": 50}),
        lambda: rollback_run(workspace, "run_a", 0),
    ):
        with pytest.raises(ActionError, match=r"edited, not in effect: .*prl runs apply run_a"):
            act()
    assert set_run_keys(workspace, "run_a", {"weight": 2}), "that is in effect whatever else is edited"
    run.evicted.write_text("why not")
    assert "edited, not in effect: " in actions.READMIT(workspace, "run_a")


def test_an_edit_carries_out_no_rollback_again(run: RunDir) -> None:
    rollback_run(run.path.parent, "run_a", 0)
    manager = restarted(run)
    run.resumed.write_bytes(_done(run))
    edit(run, weight=2.0, ckpt={"resume_step": 0})
    look(manager)
    assert pending_request(run, 0) is None and restarted(run).run(0).config.weight == 2.0
    assert pending_request(run, 0) is None


def _done(run: RunDir) -> bytes:
    import msgspec

    return msgspec.json.encode(pending_request(run, 0))


def test_age_and_place_in_the_queue_do_not_follow_the_time_of_the_file(tmp_path: Path) -> None:
    add(tmp_path, "run_0", landed=1)
    first, second = add(tmp_path, "run_1", landed=100), add(tmp_path, "run_2", landed=200)
    assert look(manager_of(tmp_path, max_runs=1)).waiting == ["run_1", "run_2"]
    edit(first, seed=7)
    os.utime(first.orch_toml, ns=(300 * 10**9, 300 * 10**9))
    assert look(manager_of(tmp_path, max_runs=1)).waiting == ["run_1", "run_2"]
    assert (view(first).added_at, view(second).added_at) == (100, 200)


def test_a_run_whose_file_was_just_written_keeps_its_place(tmp_path: Path, run: RunDir) -> None:
    add(tmp_path, "run_b")
    edit(run, optim={"lr": 0.01})
    manager = manager_of(tmp_path, max_runs=1)
    manager._discovery._settle_s = 60.0
    assert look(manager).id_2_idx == {"run_a": 0}


def test_a_run_that_is_added_has_the_time_of_that(tmp_path: Path, run: RunDir) -> None:
    run_id = actions.add_run(tmp_path, run.orch_toml, run_id="run_new")
    new = OutputDir(tmp_path).run(run_id)
    added_at = view(new).added_at
    os.utime(new.orch_toml, ns=(0, 5 * 10**9))
    assert view(new).added_at == added_at


def test_a_folder_that_was_renamed_or_copied_is_named_as_that_and_goes_on_under_its_own_name(run: RunDir) -> None:
    workspace = run.path.parent
    run.path.rename(workspace / "run_moved")
    manager = restarted(run)
    moved = RunDir(workspace / "run_moved")
    assert manager.id_2_idx == {} and view(moved).state is RunState.INVALID
    assert "is that of run_a, renamed or copied: use prl runs fork, or put the name back" in (view(moved).reason or "")
    shutil.copytree(moved.path, workspace / "run_copied")
    assert look(manager).id_2_idx == {}
    assert "is that of run_a, renamed or copied" in (view(RunDir(workspace / "run_copied")).reason or "")
    put_version(moved, 1)
    assert fork_run(workspace, "run_moved").added
    actions.delete_run(workspace, "run_moved-fork")
    moved.path.rename(run.path)
    assert look(manager).id_2_idx == {"run_a": 0} and not run.config_error.exists()
    actions.evict_run(workspace, "run_a", "asked")
    assert look(manager).id_2_idx == {} and view(run).state is RunState.EVICTED
    actions.readmit_run(workspace, "run_a")
    assert look(manager).id_2_idx == {"run_a": 0} and view(run).state is not RunState.EVICTED


def test_an_edit_changes_nothing_for_the_supervisor(run: RunDir) -> None:
    edit(run, monitor={"tensorboard": {}})
    observer = Observer(OutputDir(run.path.parent))
    assert observer._needed(run) == {INFERENCE}
    actions.apply_edit(run.path.parent, "run_a")
    restarted(run)
    assert observer._needed(run) == {INFERENCE, MONITORS} and read_effect(run).data["monitor"] == {"tensorboard": {}}
