"""The gateway below a real supervisor: it runs while a run needs it, is restarted, shown, and ended with the others."""

from __future__ import annotations

import os
import signal

import httpx

from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import GatewayStatus, read_status
from prime_rl.utils.process import ProcessId
from tests.daemons_support import PATIENCE_S, Prl


def gateway(prl: Prl) -> GatewayStatus | None:
    """Its status, while it runs."""
    status = read_status(OutputDir(prl.output_dir).gateway_status, GatewayStatus)
    return status if status and status.state == "running" and status.writer.is_running() else None


def started(prl: Prl, *, not_: ProcessId | None = None) -> GatewayStatus:
    wait_for(lambda: (now := gateway(prl)) is not None and now.writer != not_, "the gateway", timeout_s=PATIENCE_S)
    found = gateway(prl)
    assert found is not None
    return found


def test_it_runs_while_a_run_needs_it(prl: Prl) -> None:
    prl.up()
    assert "gateway" not in prl.json("status")["daemons"]
    (prl.output_dir / "pause_run_a").touch()
    file = prl.run_file("a")
    file.write_text(file.read_text().replace('id = "reverse-text"', 'id = "verifiers:some-task"'))
    prl("runs", "add", str(file))
    first = started(prl)
    assert httpx.get(f"http://{first.address}/health").json() == {"status": "ok"}
    prl.wait_state("gateway", "running")
    os.kill(first.pid, signal.SIGKILL)
    second = started(prl, not_=first.writer)
    assert (second.address, second.link) == (first.address, first.link)
    prl("restart", "gateway")
    third = started(prl, not_=second.writer)
    assert third.base_url == first.base_url
    assert "stopped by SIGTERM" in prl("logs", "gateway").stdout
    assert "gateway" in prl("status").stdout
    (prl.output_dir / "pause_run_a").unlink()
    prl.wait_state("run_a", "finished")
    wait_for(lambda: gateway(prl) is None, "the gateway to end", timeout_s=PATIENCE_S)
    prl.wait_state("gateway", "done")


def test_it_starts_with_the_workspace_where_that_is_asked_for_and_ends_with_it(prl: Prl) -> None:
    prl.up("--gateway.enabled", "true")
    first = started(prl)
    prl("down")
    last = read_status(OutputDir(prl.output_dir).gateway_status, GatewayStatus)
    assert last is not None and last.state == "stopped"
    prl.up("--gateway.enabled", "true", "--gateway.log.level", "warning")
    assert started(prl, not_=first.writer).address == first.address
