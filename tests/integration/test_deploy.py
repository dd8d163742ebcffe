"""The files in `deploy/`, as far as one machine can tell."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from daemons.commands.lifecycle import choose_system
from tests.daemons_support import ROOT

UNIT = ROOT / "deploy" / "systemd" / "prl@.service"
ENVIRONMENT = ROOT / "deploy" / "systemd" / "workspace.env.example"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    prl = tmp_path / ".local" / "bin" / "prl"
    prl.parent.mkdir(parents=True)
    prl.symlink_to(sys.executable)
    shutil.copy(UNIT, tmp_path / "prl@.service")
    env = {**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    command = ["systemd-analyze", "--user", "--man=no", "verify", str(tmp_path / "prl@main.service")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "prl@" in line]) == (0, [])


def test_the_unit_starts_what_prl_understands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    system = tmp_path / "s.toml"
    system.write_text('[model]\nname = "m"\n')
    variables = dict(re.findall(r"^#?(\w+)=(.+)$", ENVIRONMENT.read_text(), re.MULTILINE))
    line = unit["Service"]["ExecStart"].replace("${PRL_SYSTEM}", str(system))
    words = shlex.split(line)
    assert words[:3] == ["%h/.local/bin/prl", "up", "--foreground"]
    monkeypatch.setenv("PRL_OUTPUT_DIR", variables["PRL_OUTPUT_DIR"])
    wanted = choose_system(words[3:], None).system
    assert str(wanted.output_dir) == variables["PRL_OUTPUT_DIR"]
    assert int(unit["Service"]["TimeoutStopSec"]) > 2 * wanted.supervisor.drain_s + 3 * wanted.supervisor.grace_s
