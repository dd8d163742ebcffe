"""Examples of which no rollout can be made, on a living system: the runs that have them finish, and so do others."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_rl.contract.status import RunStatus, read_status
from tests.integration.test_neighbours import add_good, check_good
from tests.system_support import ROOT, Workspace, closed, make_workspace, read_metrics

# Every fourth row of 40, and the seq_len of the workspace is 96.
WORDS = "apple bread chair dream eagle"
LONG = f"Reverse: {' '.join([WORDS] * 4)}"


@pytest.fixture
def system(tmp_path: Path, untaught_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    """A workspace whose processes find the environment of tests/files, as pip would have installed it."""
    info = tmp_path / "rows-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rows\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[prime_rl.environments]\nrows = rows_env:Rows\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, ROOT / "tests" / "files", ROOT))))
    yield from closed(make_workspace(tmp_path, untaught_model, slots=5))


def add(system: Workspace, name: str, spoil: Callable[[dict[str, Any]], object], every: int = 4) -> Path:
    """Add a run over 40 rows of which each `every`-th one is spoiled; returns the file of its rows."""
    path = system.output_dir.parent / f"{name}.jsonl"
    rows = [{"id": f"row-{n}", "question": f"Reverse: {n}abc", "answer": f"cba{n}"} for n in range(41)]
    for row in rows[1::every]:
        spoil(row)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    toml = system.write_run(name, max_steps=4, env="plugin:rows")
    toml.write_text(toml.read_text().replace('wording = "short"', f'path = "{path}"'))
    system.prl("runs", "add", str(toml))
    return path


@pytest.mark.release
def test_runs_with_unusable_examples_finish_and_tell_which_they_are(system: Workspace) -> None:
    """Two good runs beside them have the weights of undisturbed ones."""
    files = {
        "long": add(system, "long", lambda row: row.update(question=LONG)),
        "null": add(system, "null", lambda row: row.update(question=None)),
        "lone": add(system, "lone", lambda row: row.pop("answer")),
    }
    add_good(system)
    ids = [f"run_{name}" for name in files]
    system.wait(lambda: {system.state(run_id) for run_id in ids} == {"finished"}, "the three runs to finish")
    reasons = {
        "long": r"\d+ prompt tokens leave no room in seq_len = 96 \(to raise it, .*; prl up --seq_len 256; .*\)",
        "null": "the content of message 0 is NoneType: must be a string",
        "lone": "KeyError: 'answer'",
    }
    spoiled = {f"rows/row-{n}" for n in range(1, 41, 4)}
    for name, file in files.items():
        run = system.run_dir(f"run_{name}")
        status = read_status(run.status, RunStatus)
        assert status is not None and 0 < status.examples_unusable <= 10
        assert status.unusable.keys() <= spoiled and len(status.unusable) == status.examples_unusable
        assert all(re.fullmatch(reasons[name], reason) for reason in status.unusable.values()), status.unusable
        assert file.with_suffix(".jsonl.starts").read_text() == "started\n", "one process, which lives on"
        last = [line for line in read_metrics(run.orchestrator_metrics) if "reward/mean" in line][-1]
        assert last["examples_unusable"] <= status.examples_unusable
        assert (last["step"], last["groups_dropped"]) == (4, 0)
    check_good(system)


@pytest.mark.release
def test_a_run_whose_examples_are_all_too_long_names_seq_len_and_the_way_to_raise_it(system: Workspace) -> None:
    add(system, "long", lambda row: row.update(question=LONG), every=1)
    system.up()
    system.wait(lambda: system.state("run_long") == "failed", "the run to fail")
    reason = system.runs()["run_long"]["reason"]
    found = re.search(r"examples tried are unusable, .* leave no room in seq_len = 96 .*: (prl .*) ID\)", reason)
    assert found, reason
    down, up, readmit = (each.split()[1:] for each in found[1].split("; "))
    assert (down, up) == (["down"], ["up", "--seq_len", "256"])
    for command in (down, up, [*readmit, "run_long"]):
        system.prl(*command)
    system.wait(lambda: system.state("run_long") == "finished", "the run to finish")
