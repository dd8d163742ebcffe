"""The orchestrator as the supervisor starts it: a real process, its memory, its signals, its exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import RunDir, list_rollout_steps
from prime_rl.contract.status import RunStatus, read_status
from prime_rl.orchestrator.guard import find_other
from prime_rl.utils.process import ProcessId
from tests.budgets import in_full
from tests.orchestrator_support import (
    FakeInference,
    config_data,
    make_model,
    make_run,
    publish,
    serving,
    stand_in_trainer,
    until,
    write_toml,
)
from tests.patience import PATIENCE_S
from tests.warm import warm

ROOT = Path(__file__).parents[2]
MAX_RESIDENT_BYTES = 120e6


@contextlib.asynccontextmanager
async def orchestrator(toml: Path, *args: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "prime_rl.orchestrator.orchestrator",
        "@",
        str(toml),
        *args,
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def prepared(tmp_path: Path, **over: Any) -> tuple[RunDir, FakeInference, dict[str, Any]]:
    model = make_model(tmp_path / "model")
    return make_run(tmp_path / "workspace"), FakeInference(model), config_data(model, **over)


async def first_batch(process: asyncio.subprocess.Process, run: RunDir) -> None:
    await until(lambda: process.returncode is not None or list_rollout_steps(run) == [1], "the first batch", PATIENCE_S)
    assert process.returncode is None, f"the orchestrator ended with {process.returncode}"


def state(run: RunDir) -> str | None:
    status = read_status(run.status, RunStatus)
    return status and status.state


async def test_a_whole_run_stays_below_its_memory_without_torch(tmp_path: Path) -> None:
    """Groups of 16 long rollouts, 64 requests in flight: what a run on a large model holds in memory."""
    run, fake, data = prepared(
        tmp_path, batch_size=128, rollouts_per_example=16, max_steps=12, seq_len=2048, eval={"interval": 4}
    )
    async with serving(fake) as url:
        toml = write_toml(run, {**data, "client": {"base_url": url}})
        trainer = asyncio.create_task(stand_in_trainer(run))
        async with orchestrator(toml) as process:
            watched = psutil.Process(process.pid)
            resident, mapped = 0, ""
            while process.returncode is None and len(list_rollout_steps(run)) < 12:
                with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                    resident = max(resident, watched.memory_info().rss)
                    mapped = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8") or mapped
                await asyncio.sleep(0.05)
            code = await asyncio.wait_for(process.wait(), PATIENCE_S)
        trainer.cancel()
    assert (code, state(run)) == (0, "finished")
    assert 10e6 < resident < MAX_RESIDENT_BYTES
    assert "tokenizers" in mapped and "torch" not in mapped


def test_importing_it_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, prime_rl.orchestrator.orchestrator as o; print({'torch', 'transformers', 'vllm'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, *in_full(signal.SIGINT)])
async def test_a_signal_stops_it_cleanly_in_any_wait(tmp_path: Path, signal_number: int) -> None:
    run, fake, data = prepared(tmp_path, max_async_level=0)
    async with serving(fake) as url:
        toml = write_toml(run, {**data, "client": {"base_url": url}})
        async with orchestrator(toml) as process:
            await first_batch(process, run)
            process.send_signal(signal_number)
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    assert state(run) == "stopped"


async def test_waiting_for_a_server_that_is_not_there_is_stopped_too(tmp_path: Path) -> None:
    run, _, data = prepared(tmp_path)
    async with orchestrator(write_toml(run, data)) as process:

        def names_it() -> bool:
            status = read_status(run.status, RunStatus)
            return status is not None and "inference/status.json" in (status.waiting_on or "")

        await until(names_it, "the missing server to be named", PATIENCE_S)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    assert state(run) == "stopped"


async def test_a_second_orchestrator_of_a_run_is_refused(tmp_path: Path) -> None:
    run, fake, data = prepared(tmp_path, max_async_level=0)
    async with serving(fake) as url:
        toml = write_toml(run, {**data, "client": {"base_url": url}})
        async with orchestrator(toml) as first:
            await first_batch(first, run)
            async with orchestrator(toml) as second:
                _, stderr = await asyncio.wait_for(second.communicate(), PATIENCE_S)
            assert second.returncode == 1
            assert f"run_a has one already (pid {first.pid})" in stderr.decode()
    assert state(run) == "running"  # the first one's file was left alone


async def test_of_two_that_cannot_see_each_other_one_goes_on_and_one_ends(tmp_path: Path) -> None:
    """As on two machines with a shared folder: no pid shows the other one."""
    run, fake, data = prepared(tmp_path, max_async_level=0)
    async with serving(fake) as url:
        toml = write_toml(run, {**data, "client": {"base_url": url}})
        async with orchestrator(toml) as first:
            await first_batch(first, run)
            first.send_signal(signal.SIGSTOP)  # or its heartbeat would reveal it to the second one
            await until(lambda: stands_still(first.pid), "its threads to stop, one may be writing the status")
            run.status.unlink()
            async with orchestrator(toml, "--seed", "7") as second:
                await until(lambda: "policy version 1" in waits_for(run, second.pid), "the second to wait", PATIENCE_S)
                first.send_signal(signal.SIGCONT)
                publish(run, 1)
                both = (first, second)
                await until(lambda: any(one.returncode is not None for one in both), "one of them to end", PATIENCE_S)
                trainer = asyncio.create_task(stand_in_trainer(run))
                loser, winner = (first, second) if first.returncode is not None else (second, first)
                written = run.rollout_file(2).read_bytes()
                assert await asyncio.wait_for(winner.wait(), PATIENCE_S) == 0
                assert loser.returncode == 1 and loser.stderr is not None
                last = (await loser.stderr.read()).decode().splitlines()[-1]
                trainer.cancel()
    assert last.startswith("orchestrator: ") and "step_2/rollouts.msgpack was written by another orchestrator" in last
    assert "keep only one" in last
    assert run.rollout_file(2).read_bytes() == written and list_rollout_steps(run) == [1, 2, 3]
    status = read_status(run.status, RunStatus)
    assert status is not None and (status.state, status.pid) == ("finished", winner.pid)


def stands_still(pid: int) -> bool:
    """Whether every thread of a process is stopped."""
    states = [path.read_text().rpartition(") ")[2][0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


def waits_for(run: RunDir, pid: int) -> str:
    status = read_status(run.status, RunStatus)
    return (status.waiting_on or "") if status is not None and status.pid == pid else ""


def test_an_orchestrator_on_another_machine_is_known_by_its_heartbeat(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    status = RunStatus(run_id="run_a", state="running")
    status.sign(ProcessId(os.getpid(), 0.0, "boot-of-another-machine/17"))
    beats = itertools.count(1)

    def beat() -> bool:
        """Called at every look: the other machine's clock is hours away."""
        status.updated_at = float(next(beats))
        write_atomic(run.status, msgspec.json.encode(status))
        return False

    beat()
    assert find_other(run, beat) == f"pid {os.getpid()} on another machine"
    assert find_other(run, lambda: False, beat_s=0.2) is None, "no heartbeat came"
    status.state = "failed"
    beat()
    assert find_other(run, beat) is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "write @ OUTPUT_DIR/run_<id>/control/orch.toml"),
        (["@", "run_a/control/orch.toml", "--batch_size", "3"], "batch_size: found 3: must be a multiple"),
        (["@", "else/control/orch.toml"], "invalid run id 'else'"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(tmp_path: Path, argv: list[str], message: str) -> None:
    run = make_run(tmp_path)
    write_toml(run, config_data(tmp_path))
    orchestrator = warm("prime_rl.orchestrator.orchestrator")
    done = orchestrator.run(argv, env=os.environ, cwd=tmp_path, timeout_s=PATIENCE_S)
    assert done.returncode == 2
    assert message in done.stderr and len(done.stderr.splitlines()) == 1
    assert not run.status.exists()


FAILS = """
import os

class Env:
    def __init__(self, args, seed):
        if args["how"] == "exits":
            os._exit(3)
        raise ValueError("no such args")
"""


@pytest.mark.parametrize(
    ("how", "reason"), [("exits", "its process ended with exit code 3"), ("raises", "ValueError: no such args")]
)
async def test_the_log_of_an_environment_that_fails_has_the_reason_and_nothing_of_asyncio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, reason: str
) -> None:
    """Beside one that is loaded, in Python's development mode."""
    (tmp_path / "failing.py").write_text(FAILS)
    info = tmp_path / "failing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: failing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[prime_rl.environments]\nfails = failing:Env\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")
    monkeypatch.setenv("PYTHONDEVMODE", "1")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 20)
    rows = {"path": "rows.jsonl", "scorer": "exact"}
    run, _, data = prepared(tmp_path, env=[{"id": "jsonl", "args": rows}, {"id": "plugin:fails", "args": {"how": how}}])
    (run.path / "data").mkdir()
    (tmp_path / "rows.jsonl").rename(run.path / "data" / "rows.jsonl")
    async with orchestrator(write_toml(run, data)) as process:
        _, log = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 1
    lines = log.decode().splitlines()
    assert lines[-1] == f"run_a failed: env 'plugin:fails': {reason}"
    assert not [
        line for line in lines if re.search("never retrieved|unclosed|destroyed|ignored in|Exception in callback", line)
    ]
