"""A workspace with alerts: real daemons that crash, stall and fail, and a webhook beside one that hangs."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator

import pytest

from daemons.alerts.incident_file import read_open
from daemons.quiet import mute
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from tests.daemons_support import Prl
from tests.patience import PATIENCE_S
from tests.unit.test_alerts_targets import Server


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture
def hanging() -> Iterator[str]:
    """A target that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def changes(server: Server) -> list[tuple[str, str, str]]:
    notes = [body for path, body in server.got if path == "/hook"]
    return [(each["kind"], each["subject"], each["state"]) for note in notes for each in note["alerts"]]


def wait_told(server: Server, *change: str) -> None:
    wait_for(lambda: change in changes(server), f"an alert {change}; there are {changes(server)}", timeout_s=PATIENCE_S)


@pytest.mark.slow
def test_what_goes_wrong_reaches_the_webhook_once_though_another_target_hangs(
    prl: Prl, server: Server, hanging: str
) -> None:
    prl.env["HOOK"] = f"{server.url}/hook"
    hooks = f'["{hanging}", "$HOOK"]'
    prl.up("--alerts.webhooks", hooks, "--alerts.dead_man_url", f"{server.url}/ping", "--alerts.dead_man_s", "1")
    wait_for(lambda: ("/ping", None) in server.got, "the dead man to be asked", timeout_s=PATIENCE_S)

    muted = prl.output_dir / "run_muted"
    muted.mkdir()
    mute(prl.output_dir, "run_invalid:run_muted", for_s=3600.0)  # prl may take longer than two looks at the folder
    muted.rmdir()
    muted.symlink_to(prl.model)
    link = prl.output_dir / "run_link"
    link.symlink_to(prl.model)
    (prl.output_dir / "fail_run_fails").touch()
    prl("runs", "add", str(prl.run_file("fails")))
    trainer = prl.daemon("trainer")
    assert trainer.pid is not None
    os.kill(trainer.pid, signal.SIGKILL)
    wait_told(server, "run_invalid", "run_link", "open")
    wait_told(server, "run_failed", "run_fails", "open")
    wait_told(server, "daemon_crashed", "trainer", "open")

    # The list is written after the targets were told.
    for key in ("run_invalid run_muted", "run_failed run_fails"):
        wait_for(
            lambda key=key: key in read_open(OutputDir(prl.output_dir)), f"{key} to be listed", timeout_s=PATIENCE_S
        )  # type: ignore[misc]
    shown = {each["kind"] for each in prl.json("alerts")["open"]}
    assert {"run_invalid", "run_failed"} <= shown
    assert "run_fails failed: told to fail" in prl("alerts").stdout
    prl("alerts", "ack", "run_failed:run_fails", "--reason", "told to")
    said = {each["subject"]: (each["muted"], each["acknowledged"]) for each in prl.json("alerts")["open"]}
    assert said["run_muted"][0]["name"] == "run_invalid:run_muted" and said["run_fails"][1]["reason"] == "told to"
    tested = json.loads(prl("alerts", "--test", "--json", exit_code=1).stdout)["sent"]
    assert [each["error"] for each in tested] == ["TimeoutError", None, None]

    link.unlink()
    wait_told(server, "run_invalid", "run_link", "over")
    (prl.output_dir / "hangs").write_text("inference/status.json\n")
    wait_told(server, "daemon_stalled", "inference", "open")
    (prl.output_dir / "hangs").unlink()
    wait_told(server, "daemon_stalled", "inference", "over")
    prl.wait_state("alerts", "running")
    assert prl.daemon("alerts").num_restarts == 0

    before = changes(server)
    assert "no process is left" in prl("down").stdout
    told = changes(server)
    assert not any(subject == "run_muted" for _, subject, _ in told)
    assert {state for *_, state in told[len(before) :]} <= {"over"}, "the end of a workspace is no alert"
    for change in (("run_failed", "run_fails", "open"), ("run_invalid", "run_link", "open")):
        assert told.count(change) == 1, "each is told once"


def test_a_target_that_is_not_set_is_refused_before_anything_runs(prl: Prl) -> None:
    refused = prl(*prl.up_args("--alerts.webhooks", '["$NOT_SET"]'), exit_code=1)
    assert "[alerts]: $NOT_SET: not set; export NOT_SET before prl up" in refused.stderr
    assert prl.members() == []


def test_a_workspace_without_the_table_has_no_such_daemon_and_says_what_to_do(prl: Prl) -> None:
    prl.up()
    assert "alerts" not in {each["name"] for each in prl.json("status")["daemons"]}
    assert "add [alerts] and run prl up again" in prl("alerts", exit_code=2).stderr
