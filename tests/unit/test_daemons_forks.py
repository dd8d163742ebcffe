"""Forks and warm starts, with no daemon anywhere: what is copied, written and refused, and what a kill leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from daemons import actions, adding
from daemons.actions import ActionError
from daemons.adding import fork_run
from daemons.cli import app
from daemons.details import find_version, parse_version, versions_of
from daemons.workspace_reader import read_workspace
from prime_rl.configs.validate import TrainerLimits, check_against_trainer, key_of, load_run_config
from prime_rl.contract.layout import OutputDir, RunDir, list_steps, stable_marker
from prime_rl.contract.status import StatusWriter, TrainerStatus
from tests.daemons_support import ROOT, RUN_TOML
from tui.actions import FieldError, ForkForm


def put_adapter(folder: Path, *, rank: int = 4, targets: tuple[str, ...] = ("q_proj",), text: str = "") -> Path:
    """A folder in PEFT format whose weights are some bytes that begin as safetensors do."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "m"}))
    head = json.dumps({"__metadata__": {"text": text}}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    return folder


def put_version(run: RunDir, step: int, *, saved: bool = False) -> None:
    put_adapter(run.broadcast_dir(step), text=f"{run.run_id} {step}")
    stable_marker(run.broadcast_dir(step)).touch()
    if saved:
        folder = put_adapter(run.trainer_checkpoint(step), text=f"{run.run_id} {step}")
        (folder / "progress.json").write_text("{}")
        (folder / "state.safetensors").write_text("moments")
        stable_marker(run.checkpoint_dir(step)).touch()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Versions 2, 4 and 6 are published, 4 is saved, 8 is half published."""
    run = RunDir(tmp_path / "out" / "run_a")
    run.control.mkdir(parents=True)
    run.orch_toml.write_text(RUN_TOML.format(max_steps=9, model="m") + "[ckpt]\nresume_step = 4\n")
    for step in (2, 4, 6):
        put_version(run, step, saved=step == 4)
    put_adapter(run.broadcast_dir(8))
    return run


def home(run: RunDir) -> Path:
    return run.path.parent


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def events(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in OutputDir(home(run)).audit.read_text().splitlines()]


def prl(run: RunDir, *args: str) -> Any:
    done = CliRunner().invoke(app, ["runs", *args, "--output-dir", str(home(run)), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_versions_are_what_is_complete(run: RunDir) -> None:
    found = {each.step: (each.published is not None, each.checkpoint is not None) for each in versions_of(run)}
    assert found == {2: (True, False), 4: (True, True), 6: (True, False)}
    assert find_version(run).name == "run_a@v6" and find_version(run, saved=True).step == 4
    with pytest.raises(ActionError, match="does not have a version of step 8; its versions: 2, 4, 6"):
        find_version(run, 8)
    with pytest.raises(ActionError, match="does not have a checkpoint of step 6; its checkpoints: 4"):
        find_version(run, 6, saved=True)
    shutil.rmtree(run.broadcast_dir(4))
    assert find_version(run, 4).adapter == run.trainer_checkpoint(4)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("run_a", ("run_a", None)), ("run_a@v20", ("run_a", 20)), ("run_a@v0", ("run_a", 0)), ("run_a@v01", None),
        ("run_a@", None), ("a", None), ("org/run_a", None), ("./run_a", None), ("run_a/../b", None),
    ],
)  # fmt: skip
def test_names_of_versions(text: str, parsed: tuple[str, int | None] | None) -> None:
    assert parse_version(text) == parsed


def test_a_fork_has_the_data_and_the_rewards_of_its_run(run: RunDir) -> None:
    env = '[[env]]\nid = "jsonl"\nargs = { path = "/own/rows.jsonl", reward = "reward.py:score" }\n'
    text = run.orch_toml.read_text(encoding="utf-8")
    run.orch_toml.write_text(text[: text.index("[[env]]")] + env, encoding="utf-8")
    with pytest.raises(ActionError, match=r"env\.0\.args\.path: .*run_a/data/own-rows\.jsonl not found"):
        fork_run(home(run), "run_a")
    run.data.mkdir()
    run.data_file("/own/rows.jsonl").write_text('{"prompt": "q"}', encoding="utf-8")
    run.data_file("reward.py").write_text("def score(answer, row): return 1", encoding="utf-8")
    fork = RunDir(home(run) / fork_run(home(run), "run_a", new_id="run_b").run_id)
    assert files(fork.data) == files(run.data) and len(files(fork.data)) == 2
    assert not fork_run(home(run), "run_a", new_id="run_b").added


def test_a_fork_has_the_version_the_config_and_the_changes(run: RunDir) -> None:
    made = fork_run(home(run), "run_a", overrides={"optim": {"lr": 0.5}}, reason="slower")
    fork, config = RunDir(home(run) / made.run_id), load_run_config(RunDir(home(run) / made.run_id).orch_toml)
    assert (made.run_id, made.source, made.added) == ("run_a-fork", "run_a@v6", True)
    assert (config.init.from_, config.optim.lr, config.max_steps) == ("run_a@v6", 0.5, 9)
    assert config.ckpt.resume_step == -1, "that of the source means nothing here"
    assert files(fork.init) == {k: v for k, v in files(run.broadcast_dir(6)).items() if k != "STABLE"}
    assert sorted(path.name for path in fork.path.iterdir()) == ["control", "init"]
    line = events(run)[-1]
    assert (line["action"], line["run_id"], line["detail"]) == ("fork", "run_a-fork", "from run_a@v6")
    shutil.rmtree(run.path)
    assert read_workspace(home(run)).run("run_a-fork") is not None


def test_a_fork_with_its_optimizer_comes_from_a_checkpoint(run: RunDir) -> None:
    made = prl(run, "fork", "run_a", "--with-optimizer", "--id", "run_b")["fork"]
    assert made == {
        "run_id": "run_b",
        "source": "run_a@v4",
        "with_optimizer": True,
        "added": True,
        "kind": "rl",
        "left_out": [],
    }
    assert files(RunDir(home(run) / "run_b").init) == files(run.trainer_checkpoint(4))
    assert fork_run(home(run), "run_a", step=4, new_id="run_b", with_optimizer=True).added is False
    with pytest.raises(ActionError, match="'run_b' already exists"):
        fork_run(home(run), "run_a", step=4, new_id="run_b")
    for changes in ({"optim": {"type": "sgd"}}, {"model": {"lora": {"rank": 8}}}, {"model": {"lora": {"alpha": 16}}}):
        with pytest.raises(ActionError, match="--with-optimizer: run_a was trained with"):
            fork_run(home(run), "run_a", with_optimizer=True, overrides=changes)
    assert len(events(run)) == 1


def test_a_dry_run_adds_nothing(run: RunDir) -> None:
    answer = prl(run, "fork", "run_a", "--step", "2", "--set", "seed=5", "--dry-run")
    assert answer["dry_run"] and answer["fork"]["run_id"] == "run_a-fork" and answer["fork"]["source"] == "run_a@v2"
    assert [path.name for path in home(run).iterdir()] == ["run_a"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": 0}, "the fork of run_a would be invalid: .*max_steps"),
        ({"init": {"from": "run_b"}}, "choose it with --step"),
        ({"model": {"lora": {"rank": 2}}}, r"run_a@v6 has rank 4, the run has model\.lora\.rank = 2"),
    ],
)
def test_what_cannot_start_is_refused_before_anything_is_made(
    run: RunDir, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ActionError, match=message):
        fork_run(home(run), "run_a", overrides=changes)
    assert [path.name for path in home(run).iterdir()] == ["run_a"]


def test_the_trainers_limits_are_the_forks(run: RunDir) -> None:
    output = OutputDir(home(run))
    status = TrainerStatus(state="waiting", model="m", max_rank=2, max_seq_len=4096)
    writer = StatusWriter(output.trainer_status, status)
    try:
        with pytest.raises(ActionError, match=r"run_a@v6 has rank 4, the run has model\.lora\.rank = 2"):
            fork_run(home(run), "run_a")
    finally:
        writer.close(state="stopped")
    path = output.component_config("trainer")
    path.parent.mkdir(parents=True)
    path.write_text('model = { name = "m", lora = { target_modules = ["v_proj"] } }\n')
    with pytest.raises(ActionError, match="run_a@v6 adapts q_proj, this workspace's trainer only v_proj"):
        fork_run(home(run), "run_a")


def test_a_run_can_be_added_from_a_version_or_a_folder(run: RunDir, tmp_path: Path) -> None:
    source = tmp_path / "warm.toml"
    folder = put_adapter(tmp_path / "peft", text="mine")
    (tmp_path / "linked").symlink_to(folder)
    for name, copied in (("run_a", run.broadcast_dir(6)), (str(tmp_path / "linked"), folder)):
        source.write_text(RUN_TOML.format(max_steps=3, model="m") + f'[init]\nfrom = "{name}"\n')
        added = RunDir(home(run) / actions.add_run(home(run), source))
        assert added.orch_toml.read_text() == source.read_text()
        assert files(added.init) == {k: v for k, v in files(copied).items() if k != "STABLE"}
    assert "starts from run_a@v6" in events(run)[0]["detail"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run_z", "run 'run_z' not found"), ("run_a@v3", "does not have a version of step 3"),
        ("nothing", "'nothing' not found: must be a run"), ("/", "/ has no adapter_config.json"),
        ("~nouser/x", "home folder of ~nouser not found: give the full path"),
    ],
)  # fmt: skip
def test_validate_reports_what_cannot_be_started_from(run: RunDir, tmp_path: Path, name: str, message: str) -> None:
    source = tmp_path / "warm.toml"
    source.write_text(RUN_TOML.format(max_steps=3, model="m") + f'[init]\nfrom = "{name}"\n')
    (problem,) = actions.check_file(home(run), source)
    assert key_of(problem).startswith("init.from") and message in problem.message
    with pytest.raises(ActionError):
        actions.add_run(home(run), source)
    assert [path.name for path in home(run).iterdir()] == ["run_a"]


def test_a_whole_model_is_not_started_from(run: RunDir, tmp_path: Path) -> None:
    (run.broadcast_dir(6) / "adapter_config.json").unlink()
    with pytest.raises(ActionError, match="run_a@v6 is a version of a whole model"):
        fork_run(home(run), "run_a")
    config = load_run_config(run.orch_toml).replace(init={"from": "run_a"})
    whole = TrainerLimits("m", max_seq_len=4096, max_rank=None)
    (problem,) = check_against_trainer(config, whole)
    assert problem.key == "init.from" and "fine-tunes the whole model" in problem.message


def test_an_adapter_on_the_hub_is_fetched_and_copied(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = tmp_path / "warm.toml", put_adapter(tmp_path / "cache", text="from afar")
    source.write_text(RUN_TOML.format(max_steps=3, model="m") + '[init]\nfrom = "org/name"\n')
    asked: list[str] = []

    def hub(name: str, **options: Any) -> str:
        asked.append(name)
        if len(asked) == 1:
            raise FileNotFoundError("no network, and not in the cache")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    assert actions.check_file(home(run), source) == [] and asked == [], "a check fetches nothing"
    with pytest.raises(ActionError, match="the hub does not give it: no network"):
        actions.add_run(home(run), source)
    assert files(RunDir(home(run) / actions.add_run(home(run), source)).init) == files(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ActionError, match=r"'org/name' on the hub has no adapter_config\.json"):
        actions.add_run(home(run), source)


def test_pipes_links_and_pieces_are_not_copied(run: RunDir, tmp_path: Path) -> None:
    weights = run.broadcast_dir(6) / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:9])
    with pytest.raises(ActionError, match="only the beginning of one"):
        fork_run(home(run), "run_a")
    weights.unlink()
    weights.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ActionError, match="is a symbolic link"):
        fork_run(home(run), "run_a")
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(ActionError, match="is a named pipe"):
        fork_run(home(run), "run_a")
    assert [path.name for path in home(run).iterdir()] == ["run_a"]


def test_a_version_that_is_removed_meanwhile_is_not_started_from(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = adding._copy

    def removed(source: Path, target: Path) -> None:
        copy(source, target)
        stable_marker(run.broadcast_dir(6)).unlink(missing_ok=True)

    monkeypatch.setattr(adding, "_copy", removed)
    with pytest.raises(ActionError, match="run_a@v6 was removed while it was copied"):
        fork_run(home(run), "run_a")
    assert list_steps(run.broadcast, stable_only=True) == [2, 4]


# What is killed: `prl`, in the middle of copying, just before the folder gets its name.
KILLED = """
import os, signal, sys
from daemons import adding
from daemons.cli import run
copy = adding._copy
def killed(source, target):
    if target.name == "adapter_model.safetensors":
        os.kill(os.getpid(), signal.SIGKILL)
    copy(source, target)
adding._copy = killed
run(sys.argv[1:])
"""


def test_a_kill_leaves_no_half_run_and_the_next_add_cleans_up(run: RunDir) -> None:
    command = [sys.executable, "-c", KILLED, "runs", "fork", "run_a", "--output-dir", str(home(run))]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert [each.run_id for each in read_workspace(home(run)).runs] == ["run_a"]
    (left,) = home(run).glob(".adding.*")
    assert (left / "init" / "adapter_config.json").exists(), "it was in the middle"
    assert fork_run(home(run), "run_a").run_id == "run_a-fork" and left.exists(), "it may be another prl at work"
    os.utime(left, (0, 0))
    assert fork_run(home(run), "run_a").run_id == "run_a-fork-2" and not left.exists()


TEXTS = '{"prompt": "q", "completion": "a"}\n{"prompt": "p", "completion": "b"}\n'


def put_texts(folder: Path) -> Path:
    (folder / "notes.jsonl").write_text(TEXTS)
    (folder / "notes.toml").write_text('batch_size = 2\n[[data]]\npath = "notes.jsonl"\n')
    return folder / "notes.toml"


def test_a_fork_of_another_kind_leaves_out_what_only_the_old_kind_has(run: RunDir, tmp_path: Path) -> None:
    more = (
        '[loss]\ntype = "cispo"\nkl_coef = 0.1\n[advantage]\ntype = "rloo"\n[eval]\ninterval = 2\n'
        '[stop]\nmetric = "reward/mean"\n[optim]\nlr = 0.002\n'
    )
    run.orch_toml.write_text(run.orch_toml.read_text() + more)
    over = put_texts(tmp_path)
    made = fork_run(home(run), "run_a", kind="sft", over=over, overrides={"sft": {"held_out_interval": 3}})
    fork = RunDir(home(run) / made.run_id)
    config = load_run_config(fork.orch_toml)
    assert (made.kind, config.kind, config.batch_size, config.sft.held_out_interval) == ("sft", "sft", 2, 3)
    assert made.left_out == ("rollouts_per_example", "env", "loss.type", "advantage", "eval", "stop")
    assert (config.loss.kl_coef, config.optim.lr, config.init.from_) == (0.1, 0.002, "run_a@v6")
    assert fork.data_file("notes.jsonl").read_text() == TEXTS, "beside the file that names it"


@pytest.mark.parametrize("text", ["batch_size = =", None])
def test_the_console_shows_a_broken_file_at_its_field(run: RunDir, tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "more.toml"
    if text:
        file.write_text(text)
    with pytest.raises(FieldError) as refused:
        ForkForm(("run_a",), config=str(file)).check(home(run))
    assert refused.value.field == "config"


def test_files_of_the_command_line_are_in_the_working_directory(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = put_texts(tmp_path)
    (here := tmp_path / "here").mkdir()
    (here / "mine.jsonl").write_text(TEXTS * 2)
    monkeypatch.chdir(here)
    more = {"data": [{"path": "mine.jsonl"}]}
    fork = RunDir(home(run) / fork_run(home(run), "run_a", kind="sft", over=over, overrides=more).run_id)
    assert fork.data_file("mine.jsonl").read_text() == (here / "mine.jsonl").read_text()


REWARDS = {"rollouts_per_example": 2, "env": [{"id": "reverse-text"}]}


def test_a_teacher_of_an_environment_is_left_out_and_the_environment_is_not(run: RunDir) -> None:
    taught = {"rollouts_per_example": 2, "env": [{"id": "reverse-text", "teacher": "base"}]}
    run.orch_toml.write_text(tomli_w.dumps({**tomllib.loads(run.orch_toml.read_text()), **taught, "kind": "distill"}))
    made = fork_run(home(run), "run_a", kind="rl", dry_run=True)
    assert (made.kind, made.left_out) == ("rl", ("env.0.teacher",))
    run.orch_toml.write_text(tomli_w.dumps(tomllib.loads(run.orch_toml.read_text()) | {"env": [1]}))
    with pytest.raises(ActionError, match=r"env\.0: found 1"):
        fork_run(home(run), "run_a", kind="rl", dry_run=True)


def test_texts_first_rewards_after(run: RunDir, tmp_path: Path) -> None:
    made = fork_run(home(run), "run_a", kind="sft", over=put_texts(tmp_path), new_id="run_texts")
    put_version(RunDir(home(run) / "run_texts"), 5, saved=True)
    text = (home(run) / "run_texts" / "control" / "orch.toml").read_text()
    (home(run) / "run_texts" / "control" / "orch.toml").write_text(
        text + '[stop]\nmetric = "held_out/loss"\nmode = "min"\n'
    )
    with pytest.raises(
        ActionError, match=r"rollouts_per_example: required.*env: required.*'rl' needs is given by --set"
    ):
        fork_run(home(run), "run_texts", kind="rl")
    with pytest.raises(ActionError, match="--with-optimizer: run_texts was trained with kind = 'sft'"):
        fork_run(home(run), "run_texts", kind="rl", overrides=REWARDS, with_optimizer=True)
    made = fork_run(home(run), "run_texts", kind="rl", overrides=REWARDS, new_id="run_b")
    config = load_run_config(RunDir(home(run) / "run_b").orch_toml)
    assert made.left_out == ("data", "stop") and (config.kind, config.data, config.stop) == ("rl", [], None)
    assert config.init.from_ == "run_texts@v5" and not RunDir(home(run) / "run_b").data.exists()
    both = fork_run(home(run), "run_texts", kind="rl", over=put_texts(tmp_path), overrides=REWARDS, new_id="run_c")
    assert both.added and len(load_run_config(RunDir(home(run) / "run_c").orch_toml).data) == 1
    assert not fork_run(home(run), "run_texts", kind="rl", overrides=REWARDS, new_id="run_b").added


def test_what_another_kind_lacks_is_named(run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ActionError, match=r"data: must have at least one \[\[data\]\].*'sft' needs is given by --set"):
        fork_run(home(run), "run_a", kind="sft")
    with pytest.raises(ActionError, match="invalid kind 'dpo': expected one of rl, sft"):
        fork_run(home(run), "run_a", kind="dpo")
    put_texts(tmp_path)
    monkeypatch.chdir(tmp_path)
    answer = prl(run, "fork", "run_a", "--kind", "sft", "--set", 'data=[{path="notes.jsonl"}]')
    assert answer["fork"]["kind"] == "sft" and answer["fork"]["left_out"] == ["rollouts_per_example", "env"]
    assert RunDir(home(run) / "run_a-fork").data_file("notes.jsonl").read_text() == TEXTS


TAUGHT = 'kind = "distill"\nteacher = "{}"\n'


def write_taught(run: RunDir, path: Path, teacher: str) -> Path:
    text = RUN_TOML.format(max_steps=9, model="m")
    path.write_text(TAUGHT.format(teacher) + text, encoding="utf-8")
    return path


def test_what_teaches_a_run_is_copied_into_it_and_into_its_forks(run: RunDir, tmp_path: Path) -> None:
    run_id = adding.add_run(home(run), write_taught(run, tmp_path / "b.toml", "run_a"))
    taught = OutputDir(home(run)).run(run_id)
    copy = files(taught.teacher_dir(0))
    assert {**copy, "STABLE": b""} == {**files(run.broadcast_dir(6)), "source.txt": b"run_a"}
    put_version(run, 7)
    put_version(taught, 1)
    fork = OutputDir(home(run)).run(fork_run(home(run), taught.run_id).run_id)
    assert files(fork.teacher_dir(0)) == copy, "the copy, not what is the newest now"
    other = fork_run(home(run), taught.run_id, new_id="run_other", overrides={"teacher": "run_a@v2"})
    other_run = OutputDir(home(run)).run(other.run_id)
    assert (files(other_run.teacher_dir(0))["source.txt"], list_steps(other_run.teachers)) == (b"run_a@v2", [0])


def test_a_teacher_is_asked_about_what_the_policy_itself_would_say(run: RunDir) -> None:
    run.orch_toml.write_text(run.orch_toml.read_text() + "[sampling]\ntemperature = 0.7\ntop_p = 0.9\nmax_tokens = 5\n")
    made = fork_run(home(run), "run_a", kind="distill", overrides={"teacher": "base"})
    config = load_run_config(OutputDir(home(run)).run(made.run_id).orch_toml)
    assert (config.sampling.temperature, config.sampling.narrows, config.sampling.max_tokens) == (1, [], 5)
    assert set(made.left_out) == {"sampling.temperature", "sampling.top_p"}


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ("run_none", "run_none"),
        ("run_none@latest", "run_none"),
        ("run_a@v3", "run_a does not have a version of step 3; its versions: 2, 4, 6"),
        ("nowhere", "'nowhere' not found: must be a run such as run_a@v20"),
    ],
)
def test_a_teacher_that_is_not_there_is_refused(run: RunDir, tmp_path: Path, teacher: str, message: str) -> None:
    path = write_taught(run, tmp_path / "b.toml", teacher)
    (problem,) = adding.check_file(home(run), path)
    assert problem.key == "teacher" and message in problem.message
    with pytest.raises(ActionError, match=r"teacher: "):
        adding.add_run(home(run), path)
    assert [each.name for each in home(run).iterdir() if each.name.startswith("run_")] == ["run_a"]


def test_a_run_that_trains_is_no_copy(run: RunDir, tmp_path: Path) -> None:
    run_id = adding.add_run(home(run), write_taught(run, tmp_path / "b.toml", "run_a@latest"))
    assert not OutputDir(home(run)).run(run_id).teachers.exists()


def test_another_teacher_is_not_set_but_forked(run: RunDir, tmp_path: Path) -> None:
    taught = OutputDir(home(run)).run(adding.add_run(home(run), write_taught(run, tmp_path / "b.toml", "run_a")))
    before = taught.orch_toml.read_text()
    with pytest.raises(ActionError, match=r"no copy of run_a@v2, it is copied .* prl runs fork run_b --set teacher="):
        actions.set_run_keys(home(run), taught.run_id, {"teacher": "run_a@v2"})
    assert taught.orch_toml.read_text() == before
    assert actions.set_run_keys(home(run), taught.run_id, {"teacher": "base"})
    assert actions.set_run_keys(home(run), taught.run_id, {"teacher": "run_a", "max_steps": 8})
