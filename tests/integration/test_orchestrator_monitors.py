"""The monitors' process beside a real run: all three monitors fed to the last line, and nothing that outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import struct

import httpx
import psutil
import pytest

from prime_rl.contract.files import append_line
from prime_rl.contract.layout import RunDir
from tests.orchestrator_support import publish, until
from tests.patience import PATIENCE_S
from tests.unit.test_orchestrator_run import Workspace, workspace  # noqa: F401

MONITORS = {"wandb": {"mode": "offline", "project": "tests"}, "tensorboard": {}, "prometheus": {}}
PORT = re.compile(r"http://127\.0\.0\.1:(\d+)/metrics")


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def update(run: RunDir, step: int) -> None:
    """What the trainer does: the version first, and then the line."""
    publish(run, step)
    write_line(run, step)


def write_line(run: RunDir, step: int) -> None:
    append_line(run.trainer_metrics, json.dumps({"step": step, "time": 1.0, "loss": step / 10}))


def wandb_history(run: RunDir) -> list[dict[str, float]]:
    """The figures in W&B's own file: records of protobuf in a log of LevelDB's form, short enough for one block."""
    from wandb.proto import wandb_internal_pb2

    (path,) = run.monitors.glob("wandb/offline-run-*/*.wandb")
    data, rows = path.read_bytes()[7:], []
    while len(data) > 7:
        (length,) = struct.unpack("<H", data[4:6])
        record = wandb_internal_pb2.Record.FromString(data[7 : 7 + length])
        if record.HasField("history"):
            items = ((item.key or "/".join(item.nested_key), item.value_json) for item in record.history.item)
            rows.append({key: json.loads(value) for key, value in items})
        data = data[7 + length :]
    return rows


@pytest.mark.slow
async def test_all_monitors_get_every_line_and_end_with_the_orchestrator(
    workspace: Workspace,  # noqa: F811
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = children()
    task = workspace.start(max_steps=2, max_async_level=0, monitor=MONITORS)
    await workspace.until_waiting_on("policy version 1")
    said = ""

    def started() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return PORT.search(said) is not None

    await until(started, "the monitors to start")
    port = PORT.search(said)
    assert port is not None
    update(workspace.run, 1)
    async with httpx.AsyncClient() as http:
        page = ""
        while 'prl_orchestrator_step{run_id="run_a"} 2.0' not in page:
            page = (await http.get(port[0])).text
            await asyncio.sleep(0.05)
    started_processes = [process for process in children() if process not in before]
    assert "wandb-core" in {process.name() for process in started_processes}
    (monitors,) = [process for process in started_processes if process.ppid() == os.getpid()]
    assert not any("libtorch" in mapped.path for mapped in monitors.memory_maps())
    publish(workspace.run, 2)
    await until(lambda: workspace.fake.adapters == {}, "the run to be over but for its monitors")
    write_line(workspace.run, 2)
    assert await asyncio.wait_for(task, PATIENCE_S) == 0
    assert living(started_processes) == []

    history = wandb_history(workspace.run)
    assert [row["step"] for row in history if "trainer/loss" in row] == [1, 2]
    assert [row["trainer/loss"] for row in history if "trainer/loss" in row] == [0.1, 0.2]
    assert [row["step"] for row in history if "orchestrator/reward/mean" in row] == [1, 2]
    assert list(workspace.run.monitors.glob("tensorboard/events*"))


async def test_monitors_that_are_killed_take_their_children_along_and_cost_the_run_one_line(
    workspace: Workspace,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = children()
    task = workspace.start(max_steps=2, max_async_level=0, monitor={"wandb": {"mode": "offline"}})
    new = lambda: [process for process in children() if process not in before]  # noqa: E731
    await until(lambda: "wandb-core" in {process.name() for process in new()}, "W&B to start")
    processes = new()
    with caplog.at_level(logging.WARNING, logger="orchestrator"):
        os.kill(next(p.pid for p in processes if p.ppid() == os.getpid()), signal.SIGKILL)
        await until(lambda: bool(caplog.messages), "the loss to be reported")
        for step in (1, 2):
            await workspace.until_waiting_on(f"policy version {step}")
            update(workspace.run, step)
        assert await asyncio.wait_for(task, PATIENCE_S) == 0
    assert [line for line in caplog.messages if "monitors" in line] == [
        "the monitors' process ended (exit code -9): the run continues without them"
    ]
    await until(lambda: living(processes) == [], "what it had started to be gone")
