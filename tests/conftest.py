"""What every test gets: no hub, no inherited house, and no process of ours left behind at the end of the session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for _name in ("PRL_OUTPUT_DIR", "PRL_API_KEY"):
    os.environ.pop(_name, None)

OUR_MODULES = ("prime_rl.trainer", "prime_rl.inference", "prime_rl.orchestrator", "daemons.", "tui.app")


def our_processes() -> list[psutil.Process]:
    """Processes of this project, other than those that run the tests, that were started below this session."""
    me = psutil.Process()
    mine = {me.pid, *(parent.pid for parent in me.parents())}
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "create_time"]):
        command = " ".join(process.info["cmdline"] or [])
        late = (process.info["create_time"] or 0) >= me.create_time()
        if process.pid not in mine and late and any(f"-m {name}" in command for name in OUR_MODULES):
            found.append(process)
    return found


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    yield
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    left = our_processes()
    commands = [" ".join(process.cmdline()) for process in left]
    for process in left:
        process.kill()
    assert not left, f"tests left these processes: {commands}"
