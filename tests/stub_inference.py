"""A stub inference server as a process that can be killed: `python -m tests.stub_inference MODEL PORT`.

It takes a moment for every completion, so that a kill meets requests under way.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import uvicorn

from tests.orchestrator_support import FakeInference

ANSWER_S = 0.02


async def take_a_moment(body: dict[str, Any]) -> None:
    await asyncio.sleep(ANSWER_S)


if __name__ == "__main__":
    fake = FakeInference(Path(sys.argv[1]))
    fake.gate = take_a_moment
    uvicorn.run(fake, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", lifespan="off", ws="none")
