"""Live: a workspace where one run carries hostile files while another trains, and nobody but that run is held up."""

from __future__ import annotations

import itertools
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from daemons import actions
from daemons.client import WorkspaceReader
from prime_rl.contract.files import wait_for, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import DaemonStatus, Status, TrainerStatus, read_status
from tests.attack_support import ATTACKS, Outside, attack, run_paths, take_away
from tests.daemons_support import PATIENCE_S, RUN_TOML, Prl
from tests.system_support import Workspace

# So many files of a run are something else at the same time: a round takes a heartbeat.
GROUP = 6


def test_a_log_and_a_status_that_are_pipes_hold_up_their_own_run_alone(prl: Prl) -> None:
    """The supervisor opened the log to append to it, and waited for ever; so did `prl down`."""
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
    reason = f"{bad.log} is a named pipe: it must be a file of its own; remove it"
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


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_with_hostile_files_holds_up_nobody_else(workspace: Workspace, tmp_path: Path) -> None:
    workspace.up()
    for name in ("good", "bad"):
        path = workspace.write_run(name, max_steps=5_000)
        path.write_text(path.read_text() + "keep_rollouts = true\n")  # in [ckpt], the last table
        workspace.prl("runs", "add", str(path))
    bad = workspace.run_dir("run_bad")
    workspace.wait(lambda: workspace.runs()["run_bad"]["step"] >= 2, "run_bad to train")
    aside, outside = tmp_path / "aside", tmp_path / "outside"
    shutil.copytree(bad.path, aside)
    # Deepest first, so that a file and its folder are rarely attacked at the same time.
    targets = sorted(run_paths(RunDir(aside)), key=lambda path: -len(path.parts))
    groups = [targets[at : at + GROUP] for at in range(0, len(targets), GROUP)]
    kinds = itertools.cycle(ATTACKS)
    for number, group in enumerate(groups):
        for attacks in (dict.fromkeys(group, "pipe"), {target: next(kinds) for target in group}):
            what = f"supervisor, trainer and run_good to go on, with {attacks} in run_bad"
            beats, watched = Beats(workspace, "run_good"), Outside(outside / f"{number}-{len(set(attacks.values()))}")
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
