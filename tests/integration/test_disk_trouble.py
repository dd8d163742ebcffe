"""File systems that fill up, run out of inodes and become read-only under a living workspace, on a tmpfs.

They need root and the right to mount, and are skipped without.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from daemons.doctor import check_inodes, check_output_dir
from daemons.workspace_reader import read_workspace
from prime_rl.contract.files import (
    FULL_BYTES,
    NotWritten,
    append_line,
    find_trouble,
    held,
    holding,
    staged_dir,
    wait_for,
    write_atomic,
)
from prime_rl.contract.layout import RunDir, list_steps
from prime_rl.contract.status import LOST_AFTER_S, TrainerStatus, read_status
from tests.daemons_support import Prl
from tests.patience import PATIENCE_S
from tests.system_support import Workspace, closed, make_workspace, read_metrics

# More than any machine makes in a test: a run that has finished is held by nothing.
MANY = 100_000
# More than are made before and between the troubles of a test.
SOME = 100
CONTINUES = "training continues by itself"


def mount(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)


@contextlib.contextmanager
def mounted(place: Path, *, num_mb: int = 4, num_inodes: int = 1_000) -> Iterator[Path]:
    """A tmpfs at `place`, which must be a folder; gone afterwards with all that was mounted over it."""
    done = mount("-t", "tmpfs", "-o", f"size={num_mb}m,nr_inodes={num_inodes}", "tmpfs", str(place))
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        while subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False).returncode == 0:
            pass


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    with mounted(place):
        yield place


@contextlib.contextmanager
def again_and_again(take: Callable[[], None]) -> Iterator[None]:
    """What is freed meanwhile, such as an older version, is taken too."""
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.wait(0.02):
            take()

    take()
    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def filled(place: Path, *, but: int = 0) -> Iterator[str]:
    """No space left but so many bytes; yields how its trouble begins."""
    path = place / "filler"

    def take() -> None:
        with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    with contextlib.nullcontext(take()) if but else again_and_again(take):
        os.truncate(path, path.stat().st_size - but)
        yield f"no space left on tmpfs ({place}): "
    path.unlink()


@contextlib.contextmanager
def without_inodes(place: Path) -> Iterator[str]:
    folder, names = place / "many", map(str, itertools.count())
    folder.mkdir()

    def take() -> None:
        with contextlib.suppress(OSError):
            while True:
                (folder / next(names)).touch()

    with again_and_again(take):
        yield f"no inodes left on tmpfs ({place}): "
    for each in folder.iterdir():
        each.unlink()
    folder.rmdir()


@contextlib.contextmanager
def read_only(place: Path) -> Iterator[str]:
    """Mounted over itself: the kernel makes no mount read-only whose files are open, unless the disk is damaged."""
    for arguments in (["--bind", str(place), str(place)], ["-o", "remount,ro,bind", str(place)]):
        done = mount(*arguments)
        assert done.returncode == 0, done.stderr
    yield f"tmpfs ({place}) is mounted read-only: "
    subprocess.run(["umount", "-l", str(place)], check=True)


TROUBLES = [filled, without_inodes, read_only]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_write_is_held_and_done_once_when_it_is_over(
    tmpfs: Path, trouble: Callable[[Path], contextlib.AbstractContextManager[str]]
) -> None:
    run, done, stop = tmpfs / "run_a", list[str](), threading.Event()
    (run / "metrics").mkdir(parents=True)
    lines, mark = run / "metrics" / "trainer.jsonl", run / "metrics" / "mark"

    def write() -> str:
        write_atomic(mark, b"x" * 5000)
        append_line(lines, "y" * 5000)
        return "written"

    assert find_trouble(tmpfs) is None
    with trouble(tmpfs) as begins:
        assert (find_trouble(tmpfs) or "").startswith(begins) and (find_trouble(tmpfs) or "").endswith(CONTINUES)
        thread = threading.Thread(target=lambda: done.append(held(write, run, stop.wait)))
        thread.start()
        wait_for(lambda: (holding() or "").startswith(begins), "the write to be held", timeout_s=PATIENCE_S)
        assert done == [] and not mark.exists() and not lines.exists()
        with pytest.raises(NotWritten, match=re.escape(begins)):
            held(write, run, lambda wait_s: True)
    thread.join(PATIENCE_S)
    assert (done, lines.read_text(), holding(), find_trouble(tmpfs)) == (["written"], "y" * 5000 + "\n", None, None)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_what_only_a_runs_own_disk_has_is_its_own_fault(
    tmp_path: Path, tmpfs: Path, trouble: Callable[[Path], contextlib.AbstractContextManager[str]]
) -> None:
    """Also below a run: its `broadcast` is another file system than the workspace's, which is well."""
    run = tmpfs / "run_a"
    (run / "broadcast").mkdir(parents=True)
    with mounted(run / "broadcast"), trouble(run / "broadcast"), pytest.raises(OSError, match=r"No space|Read-only"):
        held(lambda: write_atomic(run / "broadcast" / "x", b"x" * 5000), run, lambda wait_s: False)


def test_what_a_read_only_disk_kept_of_a_failed_write_goes_with_the_next_write(tmpfs: Path) -> None:
    (tmpfs / "run_a" / "broadcast").mkdir(parents=True)
    version = tmpfs / "run_a" / "broadcast" / "step_1"
    with contextlib.ExitStack() as stack:

        def write() -> None:
            with staged_dir(version) as folder:
                (folder / "weights").write_bytes(b"x" * 5000)
                stack.enter_context(read_only(tmpfs))
                (folder / "config").write_bytes(b"x")

        with pytest.raises(OSError, match="Read-only"):
            write()
        assert [each.name for each in tmpfs.rglob("weights")] == ["weights"], "nothing can be removed now"
    write_atomic(version.with_name("mark"), b"x")
    assert sorted(each.name for each in tmpfs.rglob("*")) == ["broadcast", "mark", "run_a"]


def test_doctor_tells_of_inodes_and_of_a_mount_that_is_read_only(tmpfs: Path) -> None:
    assert (check_inodes(tmpfs).level, check_output_dir(tmpfs).level) != ("broken", "broken")
    with without_inodes(tmpfs):
        assert (check_inodes(tmpfs).level, check_inodes(tmpfs).message) == ("broken", "0 of 1,000 free")
    with read_only(tmpfs):
        check = check_output_dir(tmpfs)
        assert (check.level, check.message) == ("broken", f"tmpfs ({tmpfs}) is mounted read-only")


@pytest.mark.slow
def test_a_supervisor_that_was_stopped_does_not_respond_and_goes_on(prl: Prl) -> None:
    prl.up()
    supervisor = prl.daemon("supervisor")
    os.kill(supervisor.pid, signal.SIGSTOP)

    def is_silent() -> bool:
        return prl.is_in("supervisor", "stalled") and prl.is_in("trainer", "lost")

    wait_for(is_silent, "the heartbeat to be old", timeout_s=PATIENCE_S)
    view, trainer = prl.daemon("supervisor"), prl.daemon("trainer")
    assert re.fullmatch(
        r"does not respond, last heartbeat [-\d]+ [:\d]+ UTC: if it was stopped, continue it with "
        rf"kill -CONT {supervisor.pid}; prl down ends it",
        view.reason or "",
    )
    assert re.fullmatch(rf"its supervisor does not respond, .* UTC; process {trainer.pid} still runs", trainer.reason)
    workspace = read_workspace(prl.output_dir)
    assert workspace.supervisor_alive and workspace.trainer is not None, "and what runs is shown"
    os.kill(supervisor.pid, signal.SIGCONT)
    wait_for(lambda: prl.is_in("supervisor", "running"), "it to go on", timeout_s=PATIENCE_S)
    os.kill(supervisor.pid, signal.SIGSTOP)
    assert "no process is left" in prl("down").stdout


@pytest.fixture
def small(tmp_path: Path, untaught_model: Path) -> Iterator[Workspace]:
    workspace = make_workspace(tmp_path, untaught_model)
    with mounted(workspace.output_dir, num_mb=40, num_inodes=10_000):
        yield from closed(workspace)


def is_held(workspace: Workspace, begins: str) -> bool:
    status = workspace.json("status")
    is_told = all(begins in (run["waiting_on"] or "") for run in status["runs"])
    return (status["bottleneck"] or "").startswith(begins) and is_told


def are_active(workspace: Workspace, num_runs: int) -> bool:
    return [run["state"] for run in workspace.runs().values()] == ["active"] * num_runs


def go_on(workspace: Workspace, num_steps: int) -> None:
    """Until each run has made so many steps."""
    before = {run_id: run["step"] for run_id, run in workspace.runs().items()}

    def is_there() -> bool:
        now = workspace.runs()
        assert {run["state"] for run in now.values()} == {"active"}, now
        return all(run["step"] >= before[run_id] + num_steps for run_id, run in now.items())

    workspace.wait(is_there, f"{num_steps} steps more")


def has_beaten_last(workspace: Workspace) -> bool:
    """Whether all heartbeats are so old that a reader would take the processes for lost."""
    status = workspace.json("status")
    return all(daemon["state"] == "stalled" for daemon in status["daemons"])


@pytest.mark.release
def test_a_disk_that_takes_nothing_holds_all_runs_and_loses_nothing(small: Workspace) -> None:
    """Each trouble lasts until every heartbeat is older than three; then the runs go on without a hand."""
    small.up()
    for name, max_steps in (("a", MANY), ("b", SOME)):
        small.prl("runs", "add", str(small.write_run(f"run_{name}", max_steps=max_steps, max_async_level=1)))
    small.wait(lambda: are_active(small, 2), "both runs to be in a slot")
    go_on(small, 2)
    for trouble in TROUBLES:
        with trouble(small.output_dir) as begins:
            small.wait(lambda begins=begins: is_held(small, begins), begins)
            small.wait(lambda: has_beaten_last(small), f"heartbeats older than {LOST_AFTER_S} s")
            said = small.prl("status").stdout
            assert is_held(small, begins) and "does not respond" in said and "lost" not in said
        go_on(small, 2)
    adapter = small.run_dir("run_a").broadcast_dir(list_steps(small.run_dir("run_a").broadcast)[-1])
    size = sum(each.stat().st_size for each in adapter.iterdir())
    assert size > 2 * FULL_BYTES, "a version that does not fit where status files do"
    with filled(small.output_dir, but=FULL_BYTES + size // 4) as begins:
        small.wait(lambda: is_held(small, begins), f"{begins}, told by the trainer")
    small.wait(lambda: small.state("run_b") == "finished", "a run to reach its last step without a hand")
    assert list_steps(small.run_dir("run_b").broadcast, stable_only=True)[-1] == SOME
    end(small)
    restarts = {daemon["name"]: daemon["num_restarts"] for daemon in small.json("status")["daemons"]}
    assert restarts == dict.fromkeys(["supervisor", "trainer", "inference", "run_a", "run_b"], 0)
    for name in ("run_a", "run_b"):
        check_whole(small.run_dir(name))
    for log in small.output_dir.glob("logs/*.log"):
        text = log.read_text()
        assert "Traceback" not in text and text.count("holding") <= 12, text


def end(workspace: Workspace) -> None:
    """Give each run a budget that it has used up, and wait until it has ended and what it leaves is written."""

    def is_empty() -> bool:
        status = read_status(workspace.paths.trainer_status, TrainerStatus)
        return status is not None and not status.runs

    for run_id, run in workspace.runs().items():
        if run["state"] != "finished":
            workspace.prl("runs", "set", run_id, "budget.max_tokens=1")
    workspace.wait(lambda: {run["state"] for run in workspace.runs().values()} == {"finished"}, "all runs to finish")
    workspace.wait(is_empty, "the trainer to save them and free their slots")


def check_whole(run: RunDir) -> None:
    """Each step once, in order, in the metrics of both, and a version and a checkpoint of the last."""
    num_steps = list_steps(run.broadcast, stable_only=True)[-1]
    assert [line["step"] for line in read_metrics(run.trainer_metrics)] == list(range(1, num_steps + 1))
    sampled = [line["step"] for line in read_metrics(run.orchestrator_metrics)]
    assert sampled == list(range(1, len(sampled) + 1)) and len(sampled) >= num_steps
    assert list_steps(run.checkpoints, stable_only=True)[-1] == num_steps
    assert not run.evicted.exists() and not list(run.path.rglob("*.tmp"))


@pytest.mark.slow
def test_a_stop_on_a_full_disk_ends_and_the_next_start_goes_on(small: Workspace) -> None:
    small.up()
    small.prl("runs", "add", str(small.write_run("run_a", max_steps=MANY)))
    small.wait(lambda: are_active(small, 1), "the run to be in a slot")
    go_on(small, 1)
    with filled(small.output_dir) as begins:
        small.wait(lambda: is_held(small, begins), begins)
        assert "no process is left" in small.prl("down").stdout
    small.up()
    small.wait(lambda: small.state("run_a") == "active", "the run to be in its slot again")
    go_on(small, 1)
    end(small)
    check_whole(small.run_dir("run_a"))
