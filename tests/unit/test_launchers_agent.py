"""The agent with real daemons: exit codes, stopping, what it leaves behind, and what a launcher reads of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from daemons.launchers.agent import (
    FIRST_BEAT_S,
    AgentLauncher,
    AgentRecord,
    Beats,
    ask_to_stop,
    forget_starts,
    kill_strays,
    left_of,
    log_of,
    lost_node,
    read_starts,
    strays_of,
    worst_of,
)
from daemons.launchers.base import Alive, Ended, Handle
from daemons.specs import on_nodes, start_ranks
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import LOST_AFTER_S, DaemonStatus
from tests.patience import PATIENCE_S, until_seen

START = "0123456789ab"
STUBBORN = (
    "import os, signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "code = 'import signal, time; signal.signal(15, signal.SIG_IGN); print(\"child\", flush=True); time.sleep(600)'\n"
    "subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
    "print('ready', flush=True); time.sleep(600)\n"
)
POLITE = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    "print('ready', flush=True); time.sleep(600)\n"
)
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def output(tmp_path: Path) -> OutputDir:
    output = OutputDir(tmp_path)
    output.daemons.mkdir()
    return output


@pytest.fixture
def start(output: OutputDir) -> Iterator[Start]:
    """Starts an agent with `python -c code` as its daemon."""
    agents: list[subprocess.Popen[bytes]] = []

    def run(code: str, *options: str, start_id: str = START, stdin: bytes | None = b"") -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "daemons.launchers.agent", str(output.path), "trainer", start_id, *options]
        agent = subprocess.Popen([*argv, "--", sys.executable, "-c", code], stdin=subprocess.PIPE)
        agents.append(agent)
        assert agent.stdin is not None
        if stdin is not None:
            agent.stdin.write(stdin + b"\n")
            agent.stdin.flush()
        return agent

    yield run
    for agent in agents:
        agent.kill()
        agent.wait()
        assert agent.stdin is not None
        agent.stdin.close()


def record(output: OutputDir, start_id: str = START) -> AgentRecord | None:
    return read_starts(output, "trainer", start_id).get(0)


def log(output: OutputDir) -> list[str]:
    """The lines that the daemon printed; its command stands in the log too."""
    path = output.log("trainer")
    return path.read_text().splitlines() if path.exists() else []


def until_ready(output: OutputDir, *words: str) -> None:
    """Until the daemon has printed these, and its agent has written it down: that may come later."""
    until_seen(lambda: record(output) is not None and {"ready", *words} <= {*log(output)}, "the daemon and its record")


def members(output: OutputDir) -> list[int]:
    """Processes of this workspace's daemon, by its mark."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get("PRL_OUTPUT_DIR") == str(output.path.resolve())
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(
    ("code", "recorded", "own"), [("exit(3)", 3, 3), ("import os; os.kill(os.getpid(), 9)", -9, 137)]
)
def test_the_record_has_the_exit_code_of_the_daemon(
    output: OutputDir, start: Start, code: str, recorded: int, own: int
) -> None:
    assert start(code).wait(PATIENCE_S) == own
    last = record(output)
    assert last is not None and (last.state, last.exit_code, last.reason) == ("ended", recorded, None)


def test_torchrun_finds_the_number_of_its_node(output: OutputDir, start: Start) -> None:
    """So the ranks of the first node come first, and rank 0 is where its daemon's process is looked for."""
    assert start("import os; print(os.environ['PET_NODE_RANK'])", "--node", "1").wait(PATIENCE_S) == 0
    assert log_of(output, "trainer", 1).read_text().splitlines()[-1] == "1"
    argv = start_ranks(4, "m", [])
    assert on_nodes(argv[1:], 2, "first:7", START)[4:] == (
        *("--nnodes", "2", "--rdzv-backend", "static", "--rdzv-endpoint", "first:7", "--rdzv-id", START),
        *("--nproc-per-node", "4", "-m", "m"),
    )


def test_of_several_nodes_the_one_that_failed_first_tells_why() -> None:
    ended = [
        AgentRecord(name="trainer", start_id=START, node=node, state="ended", exit_code=code, updated_at=at)
        for node, code, at in ((0, 1, 30.0), (1, 0, 10.0), (2, 1, 20.0))
    ]
    assert worst_of(ended).node == 2
    ended[0].reason = "the process that started it has ended"
    assert worst_of(ended).node == 0


def test_a_program_that_is_missing_is_a_reason(output: OutputDir) -> None:
    argv = [sys.executable, "-m", "daemons.launchers.agent", str(output.path), "trainer", START, "--", "/no/such"]
    assert subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode == 1
    last = record(output)
    assert last is not None and (last.state, last.pid, last.process) == ("ended", 0, None)
    assert "/no/such" in (last.reason or "")


def test_a_stop_lets_the_daemon_end_by_itself(output: OutputDir, start: Start) -> None:
    agent = start(POLITE)
    until_ready(output)
    before = record(output)
    assert before is not None and before.state == "running" and before.process is not None
    assert before.process.is_running()
    until_seen(lambda: (now := record(output)) is not None and now.beat > before.beat, "a beat")
    ask_to_stop(output, "trainer", START, PATIENCE_S)
    assert agent.wait(PATIENCE_S) == 7
    last = record(output)
    assert last is not None and (last.exit_code, last.reason) == (7, None)


def test_what_ignores_sigterm_is_killed_after_the_grace_with_its_children(output: OutputDir, start: Start) -> None:
    agent = start(STUBBORN)
    until_ready(output, "child")
    assert len(members(output)) == 2
    ask_to_stop(output, "trainer", START, PATIENCE_S)
    ask_to_stop(output, "trainer", START, 0.0)
    assert agent.wait(PATIENCE_S) == 137 and members(output) == []


def test_what_a_dead_daemon_leaves_behind_is_killed(output: OutputDir, start: Start) -> None:
    agent = start(STUBBORN)
    until_ready(output, "child")
    now = record(output)
    assert now is not None
    os.kill(now.pid, signal.SIGKILL)
    assert agent.wait(PATIENCE_S) == 137 and members(output) == []


def test_an_orphan_that_ends_while_its_daemon_lives_is_no_zombie(output: OutputDir, start: Start) -> None:
    start(
        "import subprocess, sys, time\n"
        'code = \'import subprocess, sys; print(subprocess.Popen([sys.executable, "-c", ""]).pid)\'\n'
        "print('ready', subprocess.check_output([sys.executable, '-c', code], text=True), flush=True)\n"
        "time.sleep(600)\n"
    )
    until_seen(lambda: any(line.startswith("ready ") for line in log(output)), "the daemon and its orphan")
    orphan = int(next(line for line in log(output) if line.startswith("ready ")).split()[1])
    until_seen(lambda: not psutil.pid_exists(orphan), "the orphan to be reaped")


def test_the_end_of_its_pipe_ends_the_daemon(output: OutputDir, start: Start) -> None:
    agent = start(POLITE, "--death-pipe")
    until_ready(output)
    assert agent.stdin is not None
    agent.stdin.close()
    assert agent.wait(PATIENCE_S) == 7
    last = record(output)
    assert last is not None and last.reason == "the process that started it has ended"


def test_the_death_of_its_parent_ends_the_daemon(output: OutputDir) -> None:
    argv = [sys.executable, "-m", "daemons.launchers.agent", str(output.path), "trainer", START, "--"]
    code = f"import subprocess; subprocess.run({[*argv, sys.executable, '-c', POLITE]!r}, stdin=subprocess.DEVNULL)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    until_ready(output)
    parent.kill()
    parent.wait()
    until_seen(lambda: (last := record(output)) is not None and last.state == "ended", "the end of the daemon")
    assert members(output) == []


def test_a_killed_agent_takes_its_daemon_along_and_the_next_start_what_is_left(output: OutputDir, start: Start) -> None:
    first = start(STUBBORN)
    until_ready(output, "child")
    first.kill()
    first.wait()
    until_seen(lambda: len(members(output)) == 1, "the daemon to be gone")
    start(POLITE, start_id="b" * 12)
    until_seen(lambda: (now := record(output, "b" * 12)) is not None and members(output) == [now.pid], "one daemon")


def test_keys_come_by_standard_input_and_in_no_environment(output: OutputDir, start: Start) -> None:
    code = (
        "import os; from prime_rl.utils.secrets import read_secret\n"
        "assert 'PRL_API_KEY' not in os.environ and read_secret('PRL_API_KEY', os.environ) == 'k3y'\n"
    )
    assert start(code, stdin=b'{"PRL_API_KEY": "k3y"}').wait(PATIENCE_S) == 0, log(output)


def test_a_torn_record_is_no_record(output: OutputDir) -> None:
    output.starts.mkdir()
    whole = AgentRecord(name="trainer", start_id=START, node=1, pid=1)
    write_atomic(output.agent_record("trainer", START, 1), msgspec.json.encode(whole))
    write_atomic(output.agent_record("trainer", START, 0), msgspec.json.encode(whole)[:40])
    write_atomic(output.agent_record("trainer", START, 2), msgspec.json.encode(whole))  # of another node
    for num_nodes in (None, 3):
        assert list(read_starts(output, "trainer", START, num_nodes)) == [1]
    assert read_starts(output, "trainer", START, 1) == {}


def test_a_silent_agent_is_lost_by_our_own_clock(output: OutputDir) -> None:
    output.starts.mkdir()
    now = [0.0]
    beats = Beats(lambda: now[0])

    def beat(node: int, number: int, state: str = "running") -> None:
        each = AgentRecord(name="trainer", start_id=START, node=node, beat=number, state=state, updated_at=9e9)
        write_atomic(output.agent_record("trainer", START, node), msgspec.json.encode(each))

    def lost() -> int | None:
        return lost_node(START, 2, read_starts(output, "trainer", START, 2), beats)

    assert lost() is None
    now[0] = FIRST_BEAT_S  # it may take longer to its first record
    assert lost() is None
    beat(0, 1)
    beat(1, 1)
    assert lost() is None
    now[0] += LOST_AFTER_S
    beat(0, 2)
    assert lost() is None
    now[0] += 1.0
    assert lost() == 1
    beat(1, 1, "ended")
    assert lost() is None
    assert lost_node("another", 1, {}, beats) is None
    now[0] += FIRST_BEAT_S + 1.0
    assert lost_node("another", 1, {}, beats) == 0


def test_files_of_earlier_starts_are_removed(output: OutputDir) -> None:
    output.starts.mkdir()
    names = ["trainer.a.0.json", "trainer.a.stop", "trainer.b.0.json", "trainer-2.a.0.json", "run_x.a.stop"]
    for name in names:
        (output.starts / name).touch()
    forget_starts(output, "trainer", but=["b"])
    assert sorted(path.name for path in output.starts.iterdir()) == [
        "run_x.a.stop",
        "trainer-2.a.0.json",
        "trainer.b.0.json",
    ]


def test_a_start_that_no_supervisor_has_recorded_is_found_and_killed(output: OutputDir, start: Start) -> None:
    start(STUBBORN)
    until_ready(output)
    strays = strays_of(output)
    assert len(strays) == 1 and strays_of(output, but=["trainer"]) == set()
    assert kill_strays(output, strays, lambda: None) == set()
    assert not any(process.is_running() for process in strays)
    assert strays_of(output) == set()


class Engine(AgentLauncher):
    """One that takes each start for its own, whatever its handle is."""

    def look(self, handle: Handle) -> Alive | Ended:
        return Alive(None)

    def stop(self, handle: Handle, grace_s: float) -> None: ...


def test_a_start_of_another_engine_is_not_adopted(output: OutputDir) -> None:
    for engine in ("ray", "slurm"):
        handle = Handle(engine=engine, name="trainer", start_id="5f")
        record = DaemonStatus(name="trainer", state="running", handle=handle)
        assert Engine(output, "slurm").adopt(record) == (handle if engine == "slurm" else None)
    assert Engine(output, "slurm").adopt(DaemonStatus(name="trainer", state="running")) is None


def test_what_an_agent_still_reports_is_left_of_a_start_until_the_agent_is_silent() -> None:
    now = [0.0]
    beats = Beats(lambda: now[0])
    records = [
        AgentRecord(name="trainer", start_id=START, node=0, pid=10, beat=4),
        AgentRecord(name="trainer", start_id=START, node=1, pid=11, beat=4, state="ended"),
    ]
    assert left_of(records, beats) == {10}
    now[0] = LOST_AFTER_S
    assert left_of(records, beats) == {10}
    now[0] = LOST_AFTER_S + 1
    assert left_of(records, beats) == set(), "it is gone with its node, and the daemon starts again"
