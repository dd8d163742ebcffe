"""Acknowledged and muted alerts: what is still sent, what still shows, and what is recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemons import quiet
from daemons.alerts.__main__ import ACKNOWLEDGED_FOR_S
from daemons.cli import run
from daemons.errors import ActionError
from daemons.quiet import OpenIncident, read_open, write_open
from daemons.specs import ALERTS
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import RunState
from tests.unit.test_alerts_rules import FAILED, NOW, RUN, Looks, Recorder, text, workspace

WELL = workspace(RUN)
BAD = replace(RUN, state=RunState.FAILED, reason=text("boom"))
BOTH = workspace(BAD, replace(BAD, run_id="run_b"))


@pytest.fixture
def output(tmp_path: Path) -> OutputDir:
    """A workspace with alerts, whose daemons are down."""
    output = OutputDir(tmp_path)
    for path in (output.component_config(ALERTS), output.run("run_a").orch_toml, output.run("run_b").orch_toml):
        path.parent.mkdir(parents=True)
        path.touch()
    return output


@pytest.fixture
def target() -> Recorder:
    return Recorder()


@pytest.fixture
def looks(output: OutputDir, target: Recorder, monkeypatch: pytest.MonkeyPatch) -> Looks:
    looks = Looks(output.path, target)
    monkeypatch.setattr(quiet, "time", SimpleNamespace(time=lambda: looks.now))
    return looks


def audited(output: OutputDir) -> list[tuple[str, str | None, str, str]]:
    lines = [json.loads(line) for line in output.audit.read_text().splitlines()]
    return [(each["action"], each["run_id"], each["reason"], each["detail"]) for each in lines]


def test_an_acknowledged_incident_that_comes_and_goes_is_not_reported_again(
    looks: Looks, target: Recorder, output: OutputDir
) -> None:
    looks.see(FAILED, FAILED)
    (new,) = quiet.acknowledge(output.path, "run_failed:run_a", reason="looking")
    assert new.key == "run_failed run_a"
    assert quiet.acknowledge(output.path, "run_a") == [], "it is acknowledged already"
    looks.see(WELL, WELL)
    assert target.changes() == [("run_failed", "open"), ("run_failed", "over")], "its end is still reported"
    looks.now += ACKNOWLEDGED_FOR_S / 2
    looks.see(FAILED, FAILED)
    assert list(read_open(output)) == ["run_failed run_a"], "it still shows"
    looks.see(WELL, WELL)
    assert len(target.got) == 2
    looks.now += ACKNOWLEDGED_FOR_S
    looks.see(WELL)
    looks.see(FAILED, FAILED)
    assert target.changes()[2:] == [("run_failed", "open")], "after so long it is something new"
    assert audited(output) == [("acknowledge", "run_a", "looking", "run_failed:run_a")]


@pytest.mark.parametrize(("what", "sent"), [("run_failed", []), ("run_b", ["run_a"]), ("run_failed:run_a", ["run_b"])])
def test_a_mute_silences_its_kind_or_its_subject_and_nothing_else(
    looks: Looks, target: Recorder, output: OutputDir, what: str, sent: list[str]
) -> None:
    quiet.mute(output.path, what)
    looks.see(BOTH, BOTH)
    assert [each["subject"] for note in target.got for each in note["alerts"]] == sent
    assert {each.subject for each in read_open(output).values()} == {"run_a", "run_b"}


@pytest.mark.parametrize("ends", ["by itself", "unmuted"])
def test_what_is_still_wrong_when_a_mute_ends_is_reported_then(
    looks: Looks, target: Recorder, output: OutputDir, ends: str
) -> None:
    quiet.mute(output.path, "run_a", for_s=60.0, reason="a test")
    looks.see(FAILED, FAILED)
    looks.now += 59.0
    looks.see(FAILED)
    assert target.got == []
    if ends == "unmuted":
        assert quiet.unmute(output.path, "run_a") and not quiet.unmute(output.path, "run_a")
    else:
        looks.now += 1.0
    looks.see(FAILED, FAILED)
    assert target.changes() == [("run_failed", "open")]
    assert target.got[0]["alerts"][0]["since"] == NOW
    assert audited(output)[0] == ("mute", "run_a", "a test", "run_a for 60 s")


def test_what_ends_while_it_is_muted_is_not_reported(looks: Looks, target: Recorder, output: OutputDir) -> None:
    looks.see(FAILED, FAILED)
    quiet.mute(output.path, "run_failed")
    looks.see(WELL, WELL)
    assert target.changes() == [("run_failed", "open")] and read_open(output) == {}


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda path: quiet.mute(path, "run_faild"), "'run_faild' not found in .* expected a run, a daemon or a kind"),
        (lambda path: quiet.mute(path, "failed:run_a"), "invalid kind 'failed': must be one of run_failed"),
        (lambda path: quiet.mute(path, "run_a", for_s=0.0), "invalid duration"),
        (lambda path: quiet.acknowledge(path, "run_a"), "run_a is not open in .*: prl alerts lists what is"),
    ],
)
def test_what_is_not_there_is_refused_in_one_line(output: OutputDir, act: Any, words: str) -> None:
    with pytest.raises(ActionError, match=words) as refusal:
        act(output.path)
    assert "\n" not in str(refusal.value)
    assert not output.audit.exists() and quiet.read_silences(output, NOW) == []


def test_damaged_files_and_their_text_harm_nobody(output: OutputDir) -> None:
    quiet.mute(output.path, "disk", reason="\x1b]2;owned\x07 full\nagain")
    (output.alerts_said / "x.json").write_text("{")
    (output.alerts_said / "y.json").symlink_to("/etc/passwd")
    (said,) = quiet.read_silences(output, NOW)
    assert (said.name, said.reason) == ("disk", "full again")


def test_the_commands(output: OutputDir, capsys: Any) -> None:
    def prl(*words: str) -> str:
        code = run(["alerts", *words, "--output-dir", str(output.path)])
        out, err = capsys.readouterr()
        return str(out) if code == 0 else f"{code}: {err}"

    incident = OpenIncident("run_failed", "run_a", "boom", 0.0)
    write_open(output, {incident.key: incident})
    assert "acknowledged run_failed:run_a" in prl("ack", "run_a", "--reason", "on it")
    assert "muted disk_low for 2h" in prl("mute", "disk_low", "--for", "2h")
    shown = prl()
    assert "run_a failed: boom [acknowledged by " in shown and ": on it]" in shown and "muted: disk_low for" in shown
    found = json.loads(prl("--json"))
    (one,) = found["open"]
    assert (found["version"], one["name"], one["acknowledged"]["reason"]) == (1, "run_failed:run_a", "on it")
    assert {each["name"] for each in found["said"]} == {"run_failed:run_a", "disk_low"}
    assert "unmuted disk_low" in prl("unmute", "disk_low") and "not muted" in prl("unmute", "disk_low")
    assert prl("ack", "run_b").startswith("1: ") and prl("mute", "nothing:run_a").startswith("2: ")
    output.component_config(ALERTS).unlink()
    assert "add [alerts]" in prl("mute", "disk_low")
