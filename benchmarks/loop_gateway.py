"""What the gateway costs: the time that it adds to a call, and its load with many sessions.

A real gateway process, and the end of its link that an orchestrator has, in this process; the policy behind it answers
at once, so that what is measured is HTTP, the forms and the link, and no sampling. A call has a conversation of some
thousand characters and comes through one kept connection of httpx, whose own time counts.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil

from prime_rl.configs.envs import SessionLimits
from prime_rl.contract.calls import Answer, Call, Turn
from prime_rl.contract.layout import OutputDir
from prime_rl.gateway.keys import workspace_secret
from prime_rl.orchestrator.sessions import Link, OpenSession, Sessions

NUM_CALLS = 400
NUM_SESSIONS, CALLS_PER_MIN, LOAD_S = 500, 2000, 30.0
TEXT = "What is said in one turn of a conversation with a tool, and what the tool has answered. " * 12


class AtOnce:
    """A policy that answers every call at once, with 24 tokens."""

    async def call(self, call: Call) -> Answer:
        """The same answer every time."""
        ids = list(range(24))
        return Answer(Turn("assistant", TEXT[:120]), "stop", 800, ids, [-0.5] * len(ids), 3)


def gateway_figures() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_figures(Path(folder)))


async def _figures(folder: Path) -> dict[str, float]:
    config = folder / "gateway.toml"
    config.write_text(f'output_dir = "{folder}"\n', encoding="utf-8")
    command = [sys.executable, "-m", "prime_rl.gateway.server", "@", str(config)]
    process, output = subprocess.Popen(command, stderr=subprocess.DEVNULL), OutputDir(folder)
    try:
        async with AsyncExitStack() as cleanup:
            sessions = Sessions("run_a", workspace_secret(output), None)
            linking = asyncio.create_task(Link(output, sessions).keep())
            cleanup.callback(linking.cancel)
            await sessions.served()
            opened = [
                await cleanup.enter_async_context(sessions.open(AtOnce(), SessionLimits(), lambda reward: None))
                for _ in range(NUM_SESSIONS)
            ]
            http = await cleanup.enter_async_context(httpx.AsyncClient(timeout=30))
            added = [await _added_s(http, sessions, opened[at % NUM_SESSIONS], at) for at in range(NUM_CALLS)]
            cores, num_bytes = await _load(http, opened, psutil.Process(process.pid))
            return {
                "gateway_added_ms": 1e3 * statistics.median(added),
                "gateway_cores_500_sessions": cores,
                "gateway_mib_500_sessions": num_bytes / 2**20,
            }
    finally:
        process.terminate()
        process.wait()


def _body(number: int) -> dict[str, Any]:
    messages = [{"role": "user" if at % 2 == 0 else "assistant", "content": f"{at} {TEXT}"} for at in range(5)]
    return {"model": "run_a", "messages": [*messages[:-1], {"role": "user", "content": f"{number} {TEXT}"}]}


async def _ask(http: httpx.AsyncClient, session: OpenSession, number: int) -> None:
    headers = {"Authorization": f"Bearer {session.key}"}
    response = await http.post(f"{session.base_url}/chat/completions", json=_body(number), headers=headers)
    response.raise_for_status()


async def _added_s(http: httpx.AsyncClient, sessions: Sessions, session: OpenSession, number: int) -> float:
    """The time of one call beyond that of the same call in this process."""
    start = time.perf_counter()
    await _ask(http, session, 2 * number)
    middle = time.perf_counter()
    await sessions.ask(session.id, Call((Turn("user", f"{2 * number + 1} {TEXT}"),)))
    return middle - start - (time.perf_counter() - middle)


async def _load(http: httpx.AsyncClient, opened: list[OpenSession], process: psutil.Process) -> tuple[float, int]:
    """Cores and resident bytes of the gateway while so many sessions make so many calls."""
    before, start = sum(process.cpu_times()[:2]), time.perf_counter()
    calls: set[asyncio.Task[None]] = set()
    for number in range(int(LOAD_S * CALLS_PER_MIN / 60)):
        await asyncio.sleep(max(0.0, start + number * 60 / CALLS_PER_MIN - time.perf_counter()))
        task = asyncio.create_task(_ask(http, opened[number % NUM_SESSIONS], 10**6 + number))
        calls.add(task)
        task.add_done_callback(calls.discard)
    await asyncio.gather(*calls)
    used = sum(process.cpu_times()[:2]) - before
    return used / (time.perf_counter() - start), process.memory_info().rss
