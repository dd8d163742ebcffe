"""Which workspace `prl up` means, and what others see while it makes the base model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tomli_w

from daemons.adding import trainer_limits
from daemons.cli import run as prl
from daemons.commands.lifecycle import choose_system
from daemons.launchers.base import LaunchError
from daemons.pidfile import SupervisorLock
from daemons.specs import UP, find_model, saved_folder
from daemons.supervisor_process import check_model, prepare
from daemons.up_and_down import make_ready, stop_workspace, take_workspace
from prime_rl.base_model.__main__ import Recipe
from prime_rl.configs.base import ConfigError
from prime_rl.configs.system import SystemConfig
from prime_rl.configs.validate import find_problems
from prime_rl.contract.layout import OutputDir


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRL_OUTPUT_DIR", raising=False)


def test_without_a_file_it_is_the_small_workspace_in_the_default_place(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = choose_system(["--inference.num_threads", "2"], None)
    system = wanted.system
    assert wanted.is_small and "no system file given: starting a small workspace" in capsys.readouterr().out
    assert (system.output_dir, system.trainer.output_dir, system.inference.output_dir) == (Path("outputs"),) * 3
    assert (system.model.name, system.inference.port, system.inference.num_threads) == ("models/base", 0, 2)
    assert system.trainer.seq_len == system.inference.model.max_model_len == Recipe().max_positions
    assert choose_system(["--seq_len", "64"], None).system.trainer.seq_len == 64


def test_a_named_file_or_model_is_just_that(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('output_dir = "there"\n[model]\nname = "m"\n')
    wanted = choose_system(["@", "s.toml"], None)
    assert (wanted.is_small, wanted.system.output_dir, wanted.system.seq_len) == (False, Path("there"), 2048)
    wanted = choose_system(["--model.name", "m"], None)
    assert (wanted.is_small, wanted.system.model.name, wanted.system.inference.port) == (False, "m", 8000)


def test_a_workspace_is_started_as_it_was_last_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = choose_system(["--model.name", "mine", "--seq_len", "128", "--lora.rank", "4"], tmp_path / "h").said
    place = OutputDir(tmp_path / "h").component_config(UP)
    place.parent.mkdir(parents=True)
    place.write_text(tomli_w.dumps(said))
    wanted = choose_system(["--seq_len", "256"], tmp_path / "h")
    wanted_line = capsys.readouterr().out
    assert "with its last settings" in wanted_line
    trainer = wanted.system.trainer
    assert (trainer.model.name, trainer.seq_len, wanted.is_small) == ("mine", 256, False)
    assert wanted.system.inference.model.max_model_len == 256, "what is said once reaches both daemons"
    assert trainer.model.lora is not None and trainer.model.lora.rank == 4
    assert "and with seq_len as given here" in wanted_line
    with pytest.raises(ConfigError, match=r"up\.toml and the command line: seq_length: unknown key"):
        choose_system(["--seq_length", "256"], tmp_path / "h")
    place.write_text("seq_len = [")
    with pytest.raises(ConfigError, match=r"up\.toml"):
        choose_system([], tmp_path / "h")


def test_a_workspace_starts_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative names mean the folder in which it was started first."""
    (tmp_path / "models/base").mkdir(parents=True)
    (tmp_path / "models/base/config.json").touch()
    first = choose_system(["--model.name", "models/base"], tmp_path / "h")
    take_workspace(first, OutputDir(tmp_path / "h"), print).release()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = choose_system([], Path("../h"))
    assert again.folder == first.folder == tmp_path
    assert again.said["model"] == {"name": "models/base"} == {"name": again.system.trainer.model.name}
    check_model(again.system, again.folder)
    assert find_model("models/base", again.folder) == str(tmp_path / "models/base")
    (tmp_path / "s.toml").write_text('output_dir = "../h"\n[model]\nname = "models/base"\n')
    named = choose_system(["@", "../s.toml"], None)
    assert (named.folder, named.system.model.name) == (tmp_path, "models/base"), "a file may be given too"
    take_workspace(again, OutputDir(Path("../h")), print).release()
    assert saved_folder(OutputDir(tmp_path / "h")) == tmp_path
    run = {"batch_size": 8, "rollouts_per_example": 4, "env": [{"id": "reverse-text"}]}
    limits = trainer_limits(tmp_path / "h")
    for name, fits in (("models/base", True), (str(tmp_path / "models/base"), True), ("models/other", False)):
        assert limits and (find_problems({**run, "model": {"name": name}}, "run.toml", limits) == []) is fits
    new = choose_system(["--model.name", "m"], tmp_path / "h")
    assert (new.folder, new.system.model.name) == (tmp_path / "elsewhere", "m")


def test_the_place_comes_from_the_option_else_the_environment_else_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.toml").write_text('output_dir = "file"\n[trainer]\noutput_dir = "file"\n')
    monkeypatch.setenv("PRL_OUTPUT_DIR", "environment")
    for option, place in ((Path("option"), "option"), (None, "environment")):
        system = choose_system(["@s.toml"], option).system
        assert {system.output_dir, system.trainer.output_dir, system.inference.output_dir} == {Path(place)}
    monkeypatch.delenv("PRL_OUTPUT_DIR")
    assert choose_system(["@s.toml"], None).system.output_dir == Path("file")
    assert choose_system(["--output_dir", "argument"], None).system.output_dir == Path("argument")


def test_while_the_base_model_is_made_status_tells_of_it_and_a_second_up_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = choose_system([], tmp_path / "h")
    output = OutputDir(wanted.system.output_dir)
    seen: list[str] = []

    def look() -> None:
        capsys.readouterr()
        assert prl(["status", "--output-dir", str(output.path)]) == 0
        seen.append(capsys.readouterr().out.partition("\n")[0])

    def make(*args: object, **options: object) -> None:
        look()
        with pytest.raises(LaunchError, match=f"^already running: pid {os.getpid()} since "):
            prepare(wanted.system, output, print)
        raise LaunchError("no base model")

    monkeypatch.setattr("daemons.supervisor_process.make_base_model", make)
    with pytest.raises(LaunchError, match="no base model"):
        make_ready(wanted, output, stop=lambda: False, say=print, is_quiet=False)
    look()
    assert seen[0].startswith(f"prl up is preparing (pid {os.getpid()} since ")
    assert seen[1:] == ["nothing is running: start the workspace with prl up"]


def test_the_console_is_not_ended_while_it_starts_the_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the lock for the moment of `prepare` alone, and `stop` in its other thread does not end it then."""
    wanted = choose_system([], tmp_path / "h")
    output = OutputDir(wanted.system.output_dir)
    was_running: list[bool] = []

    def make(*args: object, **options: object) -> None:
        was_running.append(stop_workspace(output.path, say=print))

    monkeypatch.setattr("daemons.supervisor_process.make_base_model", make)
    assert make_ready(wanted, output, stop=lambda: False, say=print, is_quiet=True) is not None
    assert was_running == [False]
    lock = SupervisorLock.acquire(output)
    assert lock is not None
    lock.write_info(0.0)
    with pytest.raises(LaunchError, match=r"^the workspace is being started here: stop it when it is up$"):
        stop_workspace(output.path, say=print)
    lock.release()


def test_more_than_the_positions_of_the_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """Only where it was set: by itself a workspace takes what the model has."""
    wanted = choose_system(["--seq_len", "2048"], tmp_path / "h")
    with pytest.raises(LaunchError, match=r"^seq_len = 2048: must be at most 512, the positions of base model 'models"):
        make_ready(wanted, OutputDir(tmp_path / "h"), stop=lambda: False, say=print, is_quiet=True)
    assert not (tmp_path / "h").exists() and not (tmp_path / "models").exists()
    folder = tmp_path / "m"
    folder.mkdir()
    short, said = {"max_position_embeddings": 256}, {"model": {"name": "m"}, "seq_len": 300}
    stretched = {**short, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    for text, most in ((short, 256), ({"text_config": short}, 256), (stretched, None), ({}, None), ([], None)):
        (folder / "config.json").write_text(json.dumps(text))
        check_model(SystemConfig.model_validate({"model": {"name": "m"}}), tmp_path)
        if most is None:
            check_model(SystemConfig.model_validate(said), tmp_path)
            continue
        with pytest.raises(LaunchError, match=f"at most {most}, .*: set --seq_len {most}, or choose another"):
            check_model(SystemConfig.model_validate(said), tmp_path)


def test_up_tells_of_a_workspace_that_was_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Perhaps another one was meant."""
    monkeypatch.setattr("daemons.up_and_down.start_workspace", lambda *args, **options: None)
    place = tmp_path / "typo"
    for is_new in (True, False):
        assert prl(["up", "--output-dir", str(place)]) == 130
        told = f"a new workspace will be made: {place}\n" in capsys.readouterr().out
        assert told is is_new
        place.mkdir(exist_ok=True)
