"""The acts on runs in a living system, through the console and through prl, with kill -9 in the middle.

Others show pause, continue, weight and preemption through prl (`test_system_sharing`), forks and sweeps
(`test_forks_live`), a budget (`test_daemons_budget`) and the end of a sweep with halving (`test_daemons_sweep`).
Quicker: `test_tui_steering`, `test_chat`, `test_exports`, `test_daemons_forks`, which also kill in the middle.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from textual.widgets import Checkbox, Input, TextArea

from daemons.chat import ChatSettings
from prime_rl.configs.base import load_toml
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import list_steps
from prime_rl.contract.status import InferenceStatus, read_status
from prime_rl.contract.types import read_batch
from tests.integration.test_forks_live import weights
from tests.integration.test_system_sharing import FOREVER, add, process, published, trainer, wait_until_let_go
from tests.integration.test_tui_actions import outcome, select
from tests.integration.test_tui_steering import form, mark, typed
from tests.patience import PATIENCE_S
from tests.system_support import NUM_ANSWER_TOKENS, ROOT, Workspace, closed, greedy_answer, make_workspace
from tests.tui_support import opened_app, screen_text, until
from tests.unit.test_daemons_forks import KILLED
from tui.app import PrlApp
from tui.screens.acting_places import ActingRunScreen
from tui.widgets.chat_view import ChatTalk

pytestmark = pytest.mark.release
RUN, FORK = "run_a", "run_a-fork"
QUESTION = "Reverse: abc"
ENDED = ("finish", "run_plateau")
opened = partial(opened_app, clock=time.time, size=(120, 40))


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory, untaught_model: Path) -> Iterator[Workspace]:
    """A system with two slots; one run trains without end."""
    workspace = make_workspace(tmp_path_factory.mktemp("acts"), untaught_model)
    for _ in closed(workspace):
        workspace.up()
        add(workspace, "a")
        workspace.wait(lambda: published(workspace, RUN) >= 1, "the run to train")
        yield workspace


def is_out(living: Workspace, run_id: str) -> bool:
    """It has no slot and no adapter in inference."""
    status = read_status(living.paths.inference_status, InferenceStatus)
    assert status is not None
    return run_id not in trainer(living).runs and not any(name.startswith(f"{run_id}@") for name in status.adapters)


def state_in(app: PrlApp, run_id: str) -> str | None:
    snapshot = getattr(app.screen_stack[1], "snapshot", None)
    row = snapshot.row(run_id) if snapshot else None
    return row.state if row else None


async def test_the_console_pauses_forks_weighs_and_continues(living: Workspace) -> None:
    run = living.run_dir(RUN)
    async with opened(living.output_dir) as (app, pilot):
        await select(app, pilot, RUN)
        await pilot.press("z")
        await form(app, pilot)
        await pilot.press(*"others first", "enter")
        await until(pilot, lambda: is_out(living, RUN), "the run to leave")
        await until(pilot, lambda: state_in(app, RUN) == "paused", "its state")
        step = published(living, RUN)
        assert list_steps(run.checkpoints, stable_only=True)[-1] == step, "its newest version is saved"

        await pilot.press("F")
        await form(app, pilot)
        await pilot.press("ctrl+s")
        await until(pilot, lambda: published(living, FORK) >= 1, "the fork to train")
        assert load_toml(living.run_dir(FORK).orch_toml)["init"] == {"from": f"{RUN}@v{step}"}

        await select(app, pilot, RUN)
        await pilot.press("w")
        (await form(app, pilot)).query_one("#weight", Input).value = "2"
        await pilot.press("enter")
        await outcome(app, pilot, of=f"prl runs set {RUN} weight=2")
        await until(pilot, lambda: state_in(app, RUN) == "paused" and app.screen is app.screen_stack[1], "home")
        await pilot.press("z")
        await until(pilot, lambda: published(living, RUN) > step, "the run to go on where it was")
    view = living.runs()[RUN]
    assert (view["state"], view["weight"], run.paused.exists()) == ("active", 2.0, False)


async def test_a_version_that_is_taken_home_has_the_answers_of_inference(living: Workspace, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    living.prl("runs", "pause", RUN, FORK)  # a quiet machine, and the version stays the newest
    wait_until_let_go(living, RUN)  # until then the trainer may publish what it was at
    step, merged = published(living, RUN), tmp_path / "merged"
    answer = living.answer(f"{RUN}@v{step}", QUESTION)
    living.prl("runs", "export", RUN, "--step", str(step), "--out", str(tmp_path / "adapter"))
    killed_in_a_merge(living, merged)
    async with opened(living.output_dir) as (app, pilot):
        await select(app, pilot, RUN)
        await pilot.press("E")
        dialog = await form(app, pilot)
        dialog.query_one("#out", Input).value = str(merged)
        dialog.query_one("#merge", Checkbox).value = True
        await pilot.press("ctrl+s")
        await until(pilot, lambda: merged.exists(), "the merged model")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "merged"], "the killed one left nothing"

        await until(pilot, lambda: app.screen is app.screen_stack[1], "home")
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, ActingRunScreen) and app.screen.can_show, "the run")
        screen = app.screen
        assert isinstance(screen, ActingRunScreen)
        view = screen.chat
        settings = ChatSettings(max_tokens=NUM_ANSWER_TOKENS, temperature=0.0)
        view.talk = ChatTalk(living.output_dir, RUN, view.post_message, settings)
        await pilot.press("7")
        await until(pilot, lambda: view.line.has_focus, "the tab Chat")
        await pilot.press(*QUESTION, "enter")
        await until(pilot, lambda: len(view.look.turns) == 2 and view.look.state == "idle", "the answer")
        assert (view.look.turns[1].name, view.look.turns[1].text) == (f"{RUN}@v{step}", answer)
    base = AutoModelForCausalLM.from_pretrained(living.model)
    assert greedy_answer(AutoModelForCausalLM.from_pretrained(merged), merged, QUESTION) == answer
    assert greedy_answer(PeftModel.from_pretrained(base, tmp_path / "adapter"), living.model, QUESTION) == answer
    living.wait(lambda: is_out(living, "chat/run_a"), "the console's end to unload the version")


def killed_in_a_merge(living: Workspace, out: Path) -> None:
    """kill -9 of a `prl runs export --merge` whose own process is at work."""
    command = [sys.executable, "-m", "daemons.cli", "runs", "export", RUN, "--merge", "--out", str(out)]
    environment = {**os.environ, "PRL_OUTPUT_DIR": str(living.output_dir)}
    with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL) as exporting:
        living.wait(lambda: bool(children_of(exporting.pid)), "the process that merges")
        children = children_of(exporting.pid)
        exporting.kill()
    assert not out.exists() and list(out.parent.glob(".merged.*"))
    living.wait(lambda: not any(child.is_running() for child in children), "the process that merges to end too")


def children_of(pid: int) -> list[psutil.Process]:
    return [each for each in psutil.Process(pid).children() if "prime_rl.trainer.merge" in " ".join(each.cmdline())]


def test_kills_in_the_middle_of_a_fork_lose_nothing(living: Workspace) -> None:
    """Of `prl` while it copies the version, and of the trainer as soon as the fork has its slot."""
    command = [sys.executable, "-c", KILLED, "runs", "fork", RUN, "--output-dir", str(living.output_dir)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    (half,) = living.output_dir.glob(".adding.*")
    known, victim, number = living.runs().keys(), process(living, "trainer"), trainer(living).pid
    living.prl("runs", "fork", RUN, "--id", "run_again", "--set", "max_steps=1", "--set", "ckpt.keep_rollouts=true")

    def has_begun() -> bool:
        return "run_again" in trainer(living).runs or published(living, "run_again") >= 1

    wait_for(has_begun, "the fork's slot", timeout_s=PATIENCE_S, poll_s=0.001)
    victim.send(signal.SIGKILL)
    living.wait(lambda: trainer(living).pid != number, "the trainer's restart")
    living.wait(lambda: living.state("run_again") == "finished", "the fork to train")
    fork, source = living.run_dir("run_again"), living.run_dir(RUN)
    assert weights(fork, 0) == weights(source, published(living, RUN))
    samples = read_batch(fork.rollout_file(1)).samples
    assert {sample.policy_version for sample in samples} == {0}
    has_learned = any(sample.advantage for sample in samples)  # a batch whose rewards are equal changes nothing
    assert (weights(fork, 1) != weights(fork, 0)) == has_learned
    assert living.runs().keys() - known == {"run_again"} and half.exists(), "half a fork is no run"


def test_a_kill_in_the_middle_of_a_preemption_loses_nothing(living: Workspace) -> None:
    """Of the trainer and of the run that is to give up its slot, between the mark and the save."""
    before = published(living, FORK)
    living.prl("runs", "continue", RUN, FORK)
    living.wait(lambda: {RUN, FORK} <= trainer(living).runs.keys(), "both to have slots again")
    path = living.write_run("urgent", max_steps=FOREVER)
    path.write_text(f"priority = 5\npreempt = true\n{path.read_text()}")
    victims = [process(living, name) for name in ("trainer", FORK)]
    number = trainer(living).pid
    fork = living.run_dir(FORK)
    living.prl("runs", "add", str(path))
    living.wait(fork.preempted.exists, "the preemption to begin")
    for victim in victims:
        victim.send(signal.SIGKILL)
    living.wait(lambda: trainer(living).pid != number, "the trainer's restart")
    living.wait(lambda: published(living, "run_urgent") >= 1, "the urgent run to train")
    wait_until_let_go(living, FORK)
    waits = living.runs()[FORK]
    assert waits["state"] == "waiting" and waits["reason"].startswith("preempted by run_urgent")
    assert list_steps(fork.checkpoints, stable_only=True)[-1] >= before
    before = published(living, FORK)
    living.prl("runs", "evict", "run_urgent", "--reason", "enough")
    living.wait(lambda: published(living, FORK) > before, "the preempted run to come back by itself and train")


async def test_the_console_sweeps_makes_urgent_compares_and_sets_a_budget(living: Workspace) -> None:
    """Two seeds of which one is kept: both take the slots of the two runs that train, and give them back."""
    seeds = ["run_pick-seed1", "run_pick-seed2"]
    config = living.write_run("pick", max_steps=40)  # the supervisor must see the rung before both are done
    async with opened(living.output_dir) as (app, pilot):
        await typed(app, pilot, f"sweep {config}")
        dialog = await form(app, pilot)
        dialog.query_one("#axes", TextArea).load_text("seed=1,2")
        dialog.query_one("#halving", Input).value = "8"  # its rung is at step 5
        await pilot.press("ctrl+s")
        assert (await outcome(app, pilot)).text == "sweep pick: 2 runs added"
        await until(pilot, lambda: {state_in(app, each) for each in seeds} == {"waiting"}, "both to wait")

        await mark(app, pilot, seeds)
        await typed(app, pilot, "set priority=5 preempt=true")
        await outcome(app, pilot, of="priority=5")
        await until(pilot, lambda: all(published(living, each) for each in seeds), "both to train")
        await until(pilot, lambda: {state_in(app, each) for each in seeds} == {"finished"}, "the end of both")
        ends = sorted(str(living.runs()[each]["reason"]) for each in seeds)
        assert ends[0].startswith("None") and ends[1].startswith("ended by halving at rung "), ends

        await pilot.press("escape")
        await select(app, pilot, seeds[0])
        await typed(app, pilot, f"diff {seeds[1]}")
        await until(pilot, lambda: f"prl runs diff {seeds[0]} {seeds[1]}" in screen_text(app), "the differences")
        await until(pilot, lambda: "by halving at rung" in screen_text(app), "how they ended")
        await pilot.press("escape")

        await until(pilot, lambda: {state_in(app, each) for each in (RUN, FORK)} == {"active"}, "their slots again")
        await select(app, pilot, RUN)
        await pilot.press("B")
        (await form(app, pilot)).query_one("#tokens", Input).value = "10"
        await pilot.press("enter")
        await until(pilot, lambda: state_in(app, RUN) == "finished", "the budget to end the run")
    assert living.runs()[RUN]["reason"].startswith("budget used up: ")


def test_a_stop_rule_ends_a_run_and_is_recorded(living: Workspace) -> None:
    path = living.write_run("plateau", max_steps=FOREVER)
    path.write_text(f"{path.read_text()}[stop]\nmetric = 'reward/mean'\npatience = 1\nmin_delta = 10.0\n")
    living.prl("runs", "add", str(path))

    def recorded() -> list[tuple[str, str]]:
        lines = [json.loads(line) for line in living.paths.audit.read_text().splitlines()]
        return [(line["who"], line["reason"]) for line in lines if (line["action"], line["run_id"]) == ENDED]

    living.wait(lambda: bool(recorded()), "the rule to end the run")
    assert living.state("run_plateau") == "finished"
    reason = living.runs()["run_plateau"]["reason"]
    assert reason.startswith("stopped early: reward/mean did not improve")
    assert recorded() == [("orchestrator", reason)]
