"""Whatever is in place of a run's file: nothing waits for it, follows it, or takes the memory for it.

Each file and folder of a run is in turn something else, in its own run; then all that reads runs looks at all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import typer.main

import daemons.cli
from daemons import actions
from daemons.actions import ActionError, end_run, ends_again
from daemons.logs import end_of_lines, last_lines, rotate
from daemons.machine import DiskReader
from daemons.monitors.__main__ import Feed, Monitors, Positions
from daemons.observe import Observer
from daemons.process import log_tail, spawn
from daemons.workspace_reader import WorkspaceReader
from prime_rl.configs.base import ConfigError, parse_argv
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.reports import MonitorsConfig
from prime_rl.configs.validate import load_run_config
from prime_rl.contract.files import append_line, mark_stable, wait_for, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir, list_steps, scan_runs, step_name
from prime_rl.contract.notes import ResumeRequest, pending_request
from prime_rl.contract.samples import Sample, SampleFile, read_samples
from prime_rl.contract.status import RunStatus, StatusWriter, read_status
from prime_rl.contract.types import RankEntry, RankFileWriter, max_batch_bytes, read_batch, read_rank_file
from prime_rl.contract.usage import life_of
from prime_rl.inference.guard import ApiError, confined_adapter
from prime_rl.lora.adapter_state import ADAPTER_FILE, load_peft, load_tensors, read_shapes, served_parts
from prime_rl.orchestrator.batch import find_progress, publish_batch, save_state
from prime_rl.orchestrator.guard import check_run
from prime_rl.orchestrator.metrics import last_eval_step, write_metrics
from prime_rl.trainer.checkpoint import PROGRESS_FILE, STATE_FILE, prune, remove_step, sweep, trainer_steps
from prime_rl.trainer.metrics import last_metrics_step
from prime_rl.trainer.publish import write_version
from prime_rl.trainer.runs.discovery import Discovery, Evictions, find_leave, is_finished
from prime_rl.utils.tail import FileTail
from tests.attack_support import ATTACKS, STEP, Outside, as_ordinary_user, attack, being_replaced, finishes, run_paths
from tests.budgets import in_full, in_release
from tests.patience import PATIENCE_S
from tests.trainer_support import (
    make_batch,
    published,
    put_batches,
    train_until,
    trainer_config,
    write_model,
    write_run,
)
from tui.actions import looks_like_run, read_draft
from tui.readers.tabs import TABS
from tui.readers.workspace_metrics import WorkspaceMetrics
from tui.screens.run import RunReader, RunRequest

NUM_STEPS = 2
# A sparse file is 2 GB; what a look may hold of it, and all else that a look needs.
MAX_GROWTH_BYTES = 600 << 20
GOOD = "run_good"
MAX_BATCH = max_batch_bytes(8, 64)
Look = Callable[[], object]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run with every file that trainer, orchestrator and supervisor write, made by what writes them."""
    folder = tmp_path_factory.mktemp("whole")
    model = write_model(folder / "model")
    run = write_run(folder, GOOD, model, max_steps=NUM_STEPS, ckpt={"interval": STEP, "keep_rollouts": True})
    put_batches(run, NUM_STEPS)
    for step in (STEP, NUM_STEPS):
        run.checkpoints.mkdir(exist_ok=True)
        save_state(run, make_batch(GOOD, step))
    train_until(trainer_config(folder, model), lambda: published(run) == NUM_STEPS)
    write_metrics(run.orchestrator_metrics, STEP, {"reward/mean": 0.5, "eval/reverse-text/reward": 0.5}, 1.0)
    SampleFile(run.samples, keep=4).append([Sample(1, "e", "1", "prompt", "completion", 1.0, 0.0, [0], 9, 4)])
    StatusWriter(run.status, RunStatus(run_id=GOOD, state="running", max_steps=NUM_STEPS)).close(state="stopped")
    write_atomic(run.resumed, msgspec.json.encode(ResumeRequest(0, "")))
    pass_on(run)
    spawn(["true"], run.log, folder, GOOD).wait()
    # Without these it is a run that trains; each stands there when it is attacked.
    assert not run.evicted.exists() and not run.config_error.exists()
    return run


class Silent:
    """A monitor that does nothing with what it is given."""

    name, wants_all = "silent", True

    def start(self, run_id: str, config: object) -> None: ...

    def log(self, step: int, metrics: object) -> None: ...

    def close(self) -> None: ...


def pass_on(run: RunDir) -> None:
    """All lines of its metrics, to a monitor."""
    feed = Feed(run, Silent(), {}, Positions(run))
    feed.stop()
    wait_for(lambda: feed.is_over, "the feed to end", timeout_s=PATIENCE_S)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    found = Outside(tmp_path / "outside")
    yield found
    found.close()


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user reaches; those of pytest are root's alone."""
    with tempfile.TemporaryDirectory(prefix="prl-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


PRL = typer.main.get_command(daemons.cli.app)


def prl(workspace: Path, *argv: str) -> Look:
    """A command in this process; it raises what `prl` would say in one line."""
    return lambda: PRL.main([*argv, "--output-dir", str(workspace)], prog_name="prl", standalone_mode=False)


def looks_at_all(workspace: Path) -> Iterator[tuple[str, Look]]:
    """What looks at all runs at once; none of these may raise."""
    output = OutputDir(workspace)
    names = [run.run_id for run in scan_runs(workspace)[0]]
    reader, discovery, eyes = WorkspaceReader(workspace), Discovery(workspace, lambda config: None), Observer(output)

    def discover(*active: str) -> None:
        found = discovery.scan({name: (workspace / name).stat().st_ino for name in active}, None)
        discovery.judge(found)
        discovery.report(found)

    for turn in ("first", "second"):
        yield f"the {turn} read of WorkspaceReader", lambda: reader.read(with_configs=True)
        yield f"the {turn} look of the trainer's discovery", discover
        yield f"the {turn} look of the trainer's discovery, with all in slots", partial(discover, *names)
        yield f"the {turn} look of the supervisor", lambda: eyes.runs(names)
    yield "the console's metrics", lambda: WorkspaceMetrics(workspace).update(reader.read())
    yield "the look at the disk", DiskReader(workspace).read
    yield "the look of the monitors", Monitors(output, MonitorsConfig()).look
    for argv in (["status"], ["status", "--json"], ["runs", "list"], ["runs", "list", "--json"], ["runs", "best"]):
        yield f"prl {' '.join(argv)}", prl(workspace, *argv)


def reads_of_one(run: RunDir) -> Iterator[tuple[str, Look]]:
    """What reads one run; each may refuse it with an error that says why."""
    workspace, saved = run.path.parent, run.trainer_checkpoint(STEP)
    yield "the supervisor's tail of the log", lambda: log_tail(run.log)
    yield "following the log", lambda: (FileTail(run.log).read(), end_of_lines(run.log), last_lines(run.log, 3))
    yield "the trainer's admission", lambda: (find_leave(run), trainer_steps(run), pending_request(run, 1))
    yield "whether it is finished", lambda: is_finished(run, load_run_config(run.orch_toml))
    yield "the trainer's last metrics", lambda: last_metrics_step(run)
    yield "a batch", lambda: read_batch(run.rollout_file(STEP), limit=MAX_BATCH)
    yield "an adapter", lambda: load_peft(run.broadcast_dir(STEP))
    yield "a checkpoint's adapter", lambda: load_peft(saved)
    yield "a checkpoint's state", lambda: load_tensors(saved / STATE_FILE)
    yield "the shapes of a file", lambda: read_shapes(run.broadcast_dir(STEP) / ADAPTER_FILE)
    yield "inference's check", lambda: load_peft(confined_adapter(workspace, str(run.broadcast_dir(STEP))))
    yield (
        "inference's load",
        lambda: next(served_parts({}, confined_adapter(workspace, str(run.broadcast_dir(STEP))), base="models/base")),
    )
    yield "the orchestrator's guard", lambda: (ends_again(OutputDir(workspace), run), check_run(run))
    yield "the orchestrator's config", lambda: parse_argv(OrchestratorConfig, ["@", str(run.orch_toml)])
    yield "the orchestrator's place", lambda: find_progress(run, 2, max_bytes=MAX_BATCH)
    yield "the last evaluation", lambda: last_eval_step(run.orchestrator_metrics, at_most=9)
    yield "the samples", lambda: read_samples(run.samples, 4)
    yield "a draft of the console", lambda: (looks_like_run(run.orch_toml), read_draft(run.orch_toml))
    for tab in TABS:
        reader = RunReader(workspace, run.run_id)
        request = RunRequest(tab)
        yield (
            f"the tab {tab} of the console",
            lambda reader=reader, request=request: [reader.read(request) for _ in range(3)],
        )
    yield "prl runs show --json", prl(workspace, "runs", "show", run.run_id, "--json")
    yield "prl runs show", prl(workspace, "runs", "show", run.run_id)
    yield "prl runs samples", prl(workspace, "runs", "samples", run.run_id)
    yield "prl logs", prl(workspace, "logs", run.run_id)
    yield "prl runs validate", prl(workspace, "runs", "validate", str(run.orch_toml))


def writes_of_one(run: RunDir) -> Iterator[tuple[str, Look]]:
    """What writes into one run; each may refuse it with an error that says why."""
    workspace = run.path.parent
    yield "starting its orchestrator", lambda: spawn(["true"], run.log, workspace, run.run_id).wait()
    yield "putting its log aside", lambda: rotate(run.log, 1 << 20, 2)
    yield "its monitors", lambda: pass_on(run)
    yield "its status", lambda: StatusWriter(run.status, RunStatus(run_id=run.run_id)).close(state="stopped")
    yield "its metrics", lambda: write_metrics(run.orchestrator_metrics, 9, {"reward/mean": 1.0}, 1.0)
    yield "the trainer's metrics", lambda: append_line(run.trainer_metrics, "{}")
    yield (
        "its samples",
        lambda: SampleFile(run.samples, 4).append([Sample(1, "e", "1", "prompt", "completion", 1.0, 0.0, [0], 9, 4)]),
    )
    yield "its next batch", lambda: publish_batch(run, make_batch(run.run_id, 9))
    yield "its state", lambda: save_state(run, make_batch(run.run_id, 9))
    yield "its next version", lambda: write_version(run.broadcast_dir(9), lambda folder: mark_stable(folder))
    yield "a marker", lambda: mark_stable(run.checkpoint_dir(STEP))
    yield "pruning", lambda: (sweep(run), prune(run, load_run_config(run.orch_toml).ckpt))
    yield "removing a step", lambda: [remove_step(run.broadcast / step_name(s)) for s in list_steps(run.broadcast)]
    yield "its life and its end", lambda: (life_of(run), end_run(OutputDir(workspace), run, "end", "a reason"))
    yield "its eviction by a person", lambda: actions.evict_run(workspace, run.run_id, "a reason")
    yield "its return", lambda: actions.readmit_run(workspace, run.run_id)
    yield "its eviction by the trainer", lambda: Evictions(workspace).add(run.run_id, "a reason")


def may_refuse(look: Look) -> None:
    with contextlib.suppress(OSError, ValueError, RuntimeError, ApiError):
        look()


def attacked(workspace: Path, whole: RunDir, targets: list[Path], kind: str, outside: Outside) -> dict[RunDir, Path]:
    """A run for each of `targets`, with the attack on that, and one as it should be."""
    workspace.mkdir()
    shutil.copytree(whole.path, workspace / GOOD)
    runs = {}
    for number, target in enumerate(targets):
        run = RunDir(workspace / f"run_{number}")
        shutil.copytree(whole.path, run.path)
        attack(run, target, kind, outside)
        runs[run] = target
    return runs


def is_well(workspace: Path) -> bool:
    """Whether the run that was not attacked is unchanged."""
    found = WorkspaceReader(workspace).read().run(GOOD)
    return found is not None and str(found.state) == "finished"


def look_at_all(workspace: Path, outside: Outside, kind: str) -> None:
    for what, look in looks_at_all(workspace):
        finishes(f"{what} ({kind})", look)
        assert outside.touched() == [], f"{what} ({kind})"
        assert is_well(workspace), f"{what} ({kind})"


def look_at_each(runs: dict[RunDir, Path], outside: Outside, kind: str) -> None:
    for run, target in runs.items():
        for what, look in itertools.chain(reads_of_one(run), writes_of_one(run)):
            name = f"{what}, where {target} is a {kind}"
            finishes(name, partial(may_refuse, look), run.path / target)
            assert outside.touched() == [], name


@pytest.mark.timeout(1800)
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["pipe", *in_release("link outside", "socket", "folder", "dangling link", "link to itself", "sparse file")]
)
def test_every_file_of_a_run_is_in_turn_something_else(
    tmp_path: Path, whole_run: RunDir, outside: Outside, kind: str
) -> None:
    workspace = tmp_path / "workspace"
    runs = attacked(workspace, whole_run, run_paths(whole_run), kind, outside)
    outside.guard()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    look_at_all(workspace, outside, kind)
    look_at_each(runs, outside, kind)
    assert is_well(workspace)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024
    assert grown < MAX_GROWTH_BYTES, f"{grown >> 20} MiB ({kind})"


@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_file_and_folder_of_a_run_is_in_turn_unreadable(
    place: Path, whole_run: RunDir, outside: Outside, each: bool
) -> None:
    harmless, workspace = RunDir(place / "harmless" / "run_0"), place / "workspace"
    attacked(harmless.path.parent, whole_run, [], "", outside)
    shutil.copytree(whole_run.path, harmless.path)
    runs = attacked(workspace, whole_run, run_paths(whole_run), "unreadable", outside)
    outside.guard()
    shutil.copytree(whole_run.path, workspace / "run_closed")
    (workspace / "run_closed").chmod(0)
    # Everything is imported before: the packages may be readable to root alone.
    look_at_all(harmless.path.parent, outside, "harmless")
    if each:
        look_at_each({harmless: Path("logs")}, outside, "harmless")
    with as_ordinary_user(workspace):
        refused = [run for run, target in runs.items() if not os.access(run.path / target, os.R_OK, effective_ids=True)]
        assert len(refused) == len(runs)
        look_at_all(workspace, outside, "unreadable")
        if each:
            look_at_each(runs, outside, "unreadable")
        assert is_well(workspace)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_file_of_a_run_is_replaced_while_it_is_read(tmp_path: Path, whole_run: RunDir, outside: Outside) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    files = [path for path in run_paths(whole_run) if path.suffix or (whole_run.path / path).is_file()]
    for number, target in enumerate(files):
        run = RunDir(workspace / f"run_{number}")
        shutil.copytree(whole_run.path, run.path)
        (run.path / target).parent.mkdir(parents=True, exist_ok=True)
        original = run.path / target
        decoy = outside.copy(f"{number}-{target.name}", original if original.exists() else None)
    outside.guard()
    for number, target in enumerate(files):
        run = RunDir(workspace / f"run_{number}")
        decoy = outside.folder / f"{number}-{target.name}"
        with being_replaced(run.path / target, decoy):
            for what, look in itertools.chain(reads_of_one(run), writes_of_one(run)):
                finishes(f"{what}, while {target} is replaced", partial(may_refuse, look), run.path / target)
        shutil.rmtree(run.path)
    assert outside.touched() == []


@pytest.mark.parametrize(
    ("before", "after"),
    [(b':"', b':"\xff'), *in_full((b'"', b'"\xff'), (b"{", b'{"\xff":1,')), (b"= ", b"= \xff")],
)
def test_every_text_of_a_run_is_in_turn_no_utf8(
    tmp_path: Path, whole_run: RunDir, outside: Outside, before: bytes, after: bytes
) -> None:
    """A byte in an otherwise valid file: decoders have an error of their own for it."""
    workspace = tmp_path / "workspace"
    texts = [path for path in run_paths(whole_run) if path.suffix in (".json", ".jsonl", ".toml", ".txt")]
    shutil.copytree(whole_run.path, workspace / GOOD)
    for number, target in enumerate(path for path in texts if (whole_run.path / path).is_file()):
        path = Path(shutil.copytree(whole_run.path, workspace / f"run_{number}")) / target
        path.write_bytes(path.read_bytes().replace(before, after, 1))
    look_at_all(workspace, outside, "no UTF-8")
    for run in scan_runs(workspace)[0]:
        for argv in (["runs", "show", run.run_id], ["runs", "diff", GOOD, run.run_id], ["runs", "samples", run.run_id]):
            with contextlib.suppress(ActionError, ConfigError):
                prl(workspace, *argv)()


def test_what_is_attacked_is_all_that_a_run_holds(whole_run: RunDir) -> None:
    """The list follows the layout, so new files are in it."""
    names = {str(path) for path in run_paths(whole_run)}
    assert {
        *(
            "control/orch.toml",
            "control/status.json",
            "control/evicted.txt",
            "logs/orchestrator.log",
            "logs",
            "control",
        ),
        *("rollouts/step_1/rollouts.msgpack", "broadcast/step_1/STABLE", "broadcast/step_1/adapter_model.safetensors"),
        *(f"checkpoints/step_1/trainer/{PROGRESS_FILE}", "checkpoints/step_1/orchestrator/state.json"),
        *("checkpoints/step_1/STABLE", "metrics/samples.jsonl", "monitors/state.json"),
    } <= names
    on_disk = {str(path.relative_to(whole_run.path)) for path in whole_run.path.rglob("*")}
    assert on_disk <= names


def test_a_rank_file_is_not_followed_and_a_head_that_lies_costs_nothing(tmp_path: Path, outside: Outside) -> None:
    path, decoy = tmp_path / "rank.msgpack", outside.copy("rank", None)
    outside.guard()
    for kind in ("pipe", "link outside"):
        ATTACKS[kind](path, decoy)
        for look in (lambda: list(read_rank_file(path)), lambda: RankFileWriter(path)):
            with pytest.raises(OSError, match="must be a regular file"):
                finishes(f"a rank file that is a {kind}", look, path)
        path.unlink()
    writer = RankFileWriter(path)
    writer.append(RankEntry("task", b"x"))
    writer.close()
    with path.open("ab") as file:
        file.write((1 << 29).to_bytes(4, "big") + bytes(4))
    assert [entry.task for entry in read_rank_file(path)] == ["task"] and outside.touched() == []


def test_a_status_that_is_a_pipe_holds_up_no_other_run(tmp_path: Path, whole_run: RunDir) -> None:
    """The trainer looked at `control/status.json` of every run, and waited forever at this one."""
    for name in ("run_bad", "run_other"):
        run = RunDir(tmp_path / name)
        run.control.mkdir(parents=True)
        shutil.copyfile(whole_run.orch_toml, run.orch_toml)
        os.utime(run.orch_toml, (1e9, 1e9))
    os.mkfifo(tmp_path / "run_bad" / "control" / "status.json")
    discovery = Discovery(tmp_path, lambda config: None)

    def discover() -> list[str]:
        found = discovery.scan({}, None)
        discovery.judge(found)
        return [each.run.run_id for each in found.candidates]

    pipe = tmp_path / "run_bad" / "control" / "status.json"
    assert finishes("the trainer's look", discover, pipe) == ["run_bad", "run_other"]
    assert read_status(pipe, RunStatus) is None


def test_a_refused_config_is_explained_to_people(
    tmp_path: Path, whole_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "run_bad")
    run.control.mkdir(parents=True)
    os.mkfifo(run.orch_toml)
    reason = f"{run.orch_toml} is a named pipe: must be a regular file; remove it"
    assert daemons.cli.run(["status", "--json", "--output-dir", str(tmp_path)]) == 0
    assert reason in capsys.readouterr().out
    assert daemons.cli.run(["runs", "show", "run_bad", "--output-dir", str(tmp_path)]) == 1
    assert reason in capsys.readouterr().err
