"""A workspace's gateway for tests: the daemon as a process, or its parts in this one."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import GatewayStatus, read_status
from prime_rl.gateway.app import build_app
from prime_rl.gateway.keys import workspace_secret
from prime_rl.gateway.link import LinkServer
from prime_rl.gateway.serve import serving
from prime_rl.utils.runtime import bound_socket
from tests.patience import PATIENCE_S


class Gateway:
    """The daemon of a workspace, as the supervisor starts it."""

    def __init__(self, workspace: Path, **config: Any) -> None:
        self.output = OutputDir(workspace)
        self._config = workspace / "gateway.toml"
        self._config.write_text(tomli_w.dumps({"output_dir": str(workspace), **config}))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "prime_rl.gateway.server", "@", str(self._config)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE)

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Exit code and log."""
        assert self.process is not None
        self.process.send_signal(number)
        _, log = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, log.decode()

    @property
    def status(self) -> GatewayStatus:
        found = read_status(self.output.gateway_status, GatewayStatus)
        assert found is not None
        return found

    def is_up(self) -> bool:
        status, process = read_status(self.output.gateway_status, GatewayStatus), self.process
        return status is not None and process is not None and (status.pid, status.state) == (process.pid, "running")


@contextlib.asynccontextmanager
async def gateway_here(workspace: Path) -> AsyncIterator[LinkServer]:
    """All of a gateway but its process; orchestrators find it by its status file."""
    output = OutputDir(workspace)
    secret = workspace_secret(output)
    server, sock, links = LinkServer(secret), bound_socket("127.0.0.1", 0), bound_socket("127.0.0.1", 0)
    address, link = (f"127.0.0.1:{each.getsockname()[1]}" for each in (sock, links))
    status = GatewayStatus(base_url=f"http://{address}", address=address, link=link, state="running")
    async with server.listening(links), serving(build_app(server, secret), sock):
        write_atomic(output.gateway_status, msgspec.json.encode(status))
        yield server
