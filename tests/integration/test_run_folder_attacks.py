"""Live: a workspace where one run carries hostile files or text while another trains, and no other run is held up."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from daemons import actions
from daemons.cli import run
from daemons.workspace_reader import WorkspaceReader
from prime_rl.contract.files import append_line, wait_for, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import DaemonStatus, RunStatus, Status, TrainerStatus, read_status
from tests.attack_support import ATTACKS as FILE_ATTACKS
from tests.attack_support import Outside, attack, run_paths, take_away
from tests.daemons_support import PATIENCE_S, RUN_TOML, Prl
from tests.system_support import Workspace
from tests.text_attacks import ALL, ATTACKS, RUN, Document, check_clean, sample_line, write_attacked, write_config

# So many files of a run are something else at the same time: a round takes a heartbeat.
GROUP = 12


def test_a_log_and_a_status_that_are_pipes_hold_up_their_own_run_alone(prl: Prl) -> None:
    """The supervisor opened the log to append to it, and waited forever; so did `prl down`."""
    bad = RunDir(prl.output_dir / "run_bad")
    bad.control.mkdir(parents=True)
    bad.log.parent.mkdir()
    os.mkfifo(bad.log)
    os.mkfifo(bad.status)
    prl.up()
    write_atomic(bad.orch_toml, RUN_TOML.format(max_steps=3, model=prl.model))
    wait_for(lambda: "run_bad" in held(prl), "the trainer to have run_bad in a slot", timeout_s=PATIENCE_S)
    prl("runs", "add", str(prl.run_file("good")))
    assert prl.wait_state("run_good", "finished").reason is None
    reason = f"{bad.log} is a named pipe: must be a regular file; remove it"
    shown = prl("runs", "show", "run_bad").stdout
    assert reason in " ".join(shown.split()).replace("- ", ""), shown
    assert reason in str(prl.json("runs", "show", "run_bad"))
    assert reason in str(prl.json("status"))
    bad.log.unlink()  # what the message asks for
    prl.wait_state("run_bad", "finished")
    assert "no process is left" in prl("down").stdout


def held(prl: Prl) -> set[str]:
    trainer = read_status(OutputDir(prl.output_dir).trainer_status, TrainerStatus)
    return set(trainer.runs) if trainer is not None else set()


class Beats:
    """What supervisor, trainer and the other run write again and again while they work."""

    def __init__(self, workspace: Workspace, run_id: str) -> None:
        self._files: dict[Path, type[Status]] = {
            workspace.paths.daemon_status("supervisor"): DaemonStatus,
            workspace.paths.trainer_status: TrainerStatus,
        }
        self._reader, self._run_id = WorkspaceReader(workspace.output_dir), run_id
        self._last = self._now()

    def _now(self) -> list[float]:
        statuses = [read_status(path, kind) for path, kind in self._files.items()]
        run = self._reader.read().run(self._run_id)
        return [*(status.updated_at if status else 0.0 for status in statuses), float(run.step if run else 0)]

    def went_on(self) -> bool:
        return all(now > last for now, last in zip(self._now(), self._last, strict=True))


def restore(path: Path, original: Path) -> None:
    """What the owner of the run would do."""
    take_away(path)
    if original.is_dir():
        shutil.copytree(original, path)
    elif original.exists():
        shutil.copyfile(original, path)


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_a_run_with_hostile_files_holds_up_no_other_run(workspace: Workspace, tmp_path: Path) -> None:
    workspace.up()
    for name in ("good", "bad"):
        path = workspace.write_run(name, max_steps=5_000)
        path.write_text(path.read_text() + "keep_rollouts = true\n")  # in [ckpt], the last table
        workspace.prl("runs", "add", str(path))
    bad = workspace.run_dir("run_bad")
    workspace.wait(lambda: workspace.runs()["run_bad"]["step"] >= 2, "run_bad to train")
    aside, outside = tmp_path / "aside", tmp_path / "outside"
    with suppress(shutil.Error):  # what the trainer removes meanwhile; the rest is copied
        shutil.copytree(bad.path, aside)
    # Deepest first, so that a file and its folder are rarely attacked at the same time.
    targets = sorted(run_paths(RunDir(aside)), key=lambda path: -len(path.parts))
    groups = [targets[at : at + GROUP] for at in range(0, len(targets), GROUP)]
    kinds = itertools.cycle(FILE_ATTACKS)
    for number, group in enumerate(groups):
        for turn, attacks in enumerate((dict.fromkeys(group, "pipe"), {target: next(kinds) for target in group})):
            what = f"supervisor, trainer and run_good to go on, with {attacks} in run_bad"
            beats, watched = Beats(workspace, "run_good"), Outside(outside / f"{number}-{turn}")
            for target, kind in attacks.items():
                with suppress(OSError):  # the trainer removes and renames meanwhile
                    attack(bad, target, kind, watched)
            watched.guard()
            workspace.wait(beats.went_on, what)
            assert watched.touched() == [], what
            watched.close()
            for target in reversed(attacks):
                with suppress(OSError):
                    restore(bad.path / target, aside / target)
            with suppress(actions.ActionError):
                actions.readmit_run(workspace.output_dir, bad.run_id)
    done = workspace.prl("down")
    assert "no process is left" in done.stdout
    assert workspace.processes() == []


def hostile_configs(workspace: Workspace, text: str) -> dict[str, Document]:
    """Of runs that are refused, evicted or fail, each with a reason that quotes the run."""
    valid = tomllib.loads(workspace.write_run("hostile").read_text())
    return {
        "run_key": {**valid, text: text},
        "run_name": {**valid, "env": [{"id": "reverse-text", "name": text}]},
        "run_env": {**valid, "env": [{"id": f"plugin:{text}"}]},
        "run_wandb": {**valid, "monitor": {"wandb": {"project": text}}},
        "run_model": {**valid, "model": {**valid["model"], "name": text}},
        "run_failed": valid,
        "run_args": {**valid, "env": [{"id": "reverse-text", "args": {text: text}}]},
    }


def shout(run: RunDir, output: OutputDir, text: str) -> None:
    """What the owner of a run that trains may write meanwhile, wherever text is read."""
    write_attacked(output, RunStatus, lambda place: None if place in (".state", ".run_id") else text)
    run.samples.write_bytes(sample_line(lambda place: text))
    append_line(run.log, text)
    for path in (run.orchestrator_metrics, run.trainer_metrics):
        append_line(path, json.dumps({"step": 1, "time": 1.0, text: 1.0, f"eval/{text}/reward": 0.5}))


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_a_run_with_hostile_text_reaches_no_terminal_and_holds_up_nobody_else(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    output, bad, text = workspace.paths, workspace.run_dir(RUN), ALL.replace("{}", "shown")

    def printed(*words: str) -> str:
        run([*words, "--output-dir", str(output.path)])
        return check_clean(" ".join(words), iter(capsys.readouterr()))

    workspace.up()
    workspace.prl("runs", "add", str(workspace.write_run("good", max_steps=5_000)))
    configs = hostile_configs(workspace, text)
    for run_id, config in configs.items():
        if run_id == "run_failed":  # before its config: the trainer must never find it without
            output.run(run_id).control.mkdir(parents=True)
            failed = {"run_id": run_id, "state": "failed", "reason": text}
            output.run(run_id).status.write_text(json.dumps(failed))
        write_config(output, run_id, config)
    for run_id in configs:
        workspace.wait(lambda run_id=run_id: "shown" in printed("runs", "show", run_id), f"what is wrong with {run_id}")  # type: ignore[misc]
    # It keeps the slot that some of the others need until they fail.
    workspace.prl("runs", "add", str(workspace.write_run("bad", max_steps=5_000)), "--id", RUN)
    workspace.wait(lambda: workspace.runs()[RUN]["step"] >= 1, f"{RUN} to train")
    for each in (text, ATTACKS["lines"].replace("{}", "shown"), ATTACKS["megabyte"]):
        beats = Beats(workspace, "run_good")
        shout(bad, output, each)
        for words in (("status",), ("runs", "list"), ("runs", "show", RUN)):
            printed(*words)
            assert printed(*words, "--json").isascii()
        printed("runs", "samples", RUN)
        assert "shown" in printed("logs", RUN, "-n", "100000")
        workspace.wait(beats.went_on, f"supervisor, trainer and run_good to go on beside {each[:40]!r}")
    for name in ("supervisor", "trainer", "inference"):
        printed("logs", name, "-n", "100000")
        check_clean(f"the log of {name}", iter((output.log(name).read_text(),)))
    assert "no process is left" in workspace.prl("down").stdout
    assert workspace.processes() == []
