"""Usage files: counted once whatever is killed when, small however long, and apart for runs of the same id."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from prime_rl.contract.files import FileRefused
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.usage import COMPACT_BYTES, UsageLog, budget_reason, life_of, read_usage

DAY_S = 86_400.0


def sums(path: Path) -> dict[str, int]:
    """Tokens by run and life."""
    found: dict[str, int] = {}
    for line in read_usage(path).values():
        name = f"{line.run_id} {line.life}".strip()
        found[name] = found.get(name, 0) + line.tokens
    return found


def test_counters_go_on_after_a_kill_at_any_byte(tmp_path: Path) -> None:
    """The writer is killed in the middle of a line, again and again: what was written whole counts, once."""
    path, rng, expected = tmp_path / "usage" / "run_a.jsonl", random.Random(4), 0
    for step in range(1, 30):
        log = UsageLog(path, lambda: 0.5 * DAY_S)
        assert sum(line.tokens for line in log.of_life("run_a", "x")) == expected
        log.add("run_a", life="x", step=step, used={"tokens": step, "work_s": 0.5})
        whole = path.read_bytes()
        if rng.random() < 0.5:  # the last line is torn
            path.write_bytes(whole[: -rng.randrange(2, 30)])
        else:
            expected += step
        assert sums(path).get("run_a x", 0) == expected


def test_days_lives_and_runs_are_apart(tmp_path: Path) -> None:
    now = [0.0]
    log = UsageLog(tmp_path / "usage" / "trainer.jsonl", lambda: now[0])
    log.add("run_a", life="x", used={"tokens": 1})
    log.add("run_b", used={"tokens": 10})
    now[0] = DAY_S
    log.add("run_a", life="x", tags=["t"], used={"tokens": 2})
    log.add("run_a", life="y", used={"tokens": 4})
    found = read_usage(tmp_path / "usage" / "trainer.jsonl")
    assert {key: line.tokens for key, line in found.items()} == {
        ("run_a", "x", "1970-01-01"): 1,
        ("run_b", "", "1970-01-01"): 10,
        ("run_a", "x", "1970-01-02"): 2,
        ("run_a", "y", "1970-01-02"): 4,
    }
    assert sum(line.tokens for line in log.of_life("run_a", "x")) == 3


def test_a_file_stays_small_and_keeps_its_sums(tmp_path: Path) -> None:
    path = tmp_path / "usage" / "trainer.jsonl"
    line = json.dumps({"version": 1, "run_id": "run_b", "day": "2026-01-01", "tokens": 7})
    path.parent.mkdir()
    path.write_text(f"{line}\nnot a line\n" + "#" * COMPACT_BYTES + "\n")
    log = UsageLog(path, lambda: 0.0)
    log.add("run_a", used={"tokens": 5})
    assert path.stat().st_size < 1_000
    assert sums(path) == {"run_a": 5, "run_b": 7}
    log.add("run_a", used={"tokens": 5})
    assert sums(path) == {"run_a": 10, "run_b": 7}


def test_a_disk_that_takes_nothing_costs_no_count(tmp_path: Path) -> None:
    path = tmp_path / "workspace" / "usage" / "run_a.jsonl"
    log = UsageLog(path, lambda: 0.0)
    log.add("run_a", used={"tokens": 5})  # the workspace is not there
    assert not path.exists()
    path.parent.parent.mkdir()
    log.add("run_a", used={"tokens": 1})
    assert sums(path) == {"run_a": 6}


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    import os

    path = tmp_path / "usage" / "run_a.jsonl"
    path.parent.mkdir()
    os.mkfifo(path)
    log = UsageLog(path)
    log.add("run_a", used={"tokens": 5})
    assert sum(line.tokens for line in log.of_life("run_a", "")) == 5
    with pytest.raises(FileRefused):
        read_usage(path)


def test_a_run_has_one_life_and_the_next_of_its_id_another(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run_a")
    run.control.mkdir(parents=True)
    life = life_of(run)
    assert life and life_of(run) == life
    run.path.rename(tmp_path / "elsewhere")
    run.control.mkdir(parents=True)
    assert life_of(run) not in ("", life)
    assert OutputDir(tmp_path).run_usage("run_a").parent == OutputDir(tmp_path).usage


@pytest.mark.parametrize(
    ("tokens", "hours", "limits", "reason"),
    [
        (999, 5.0, {"max_tokens": 1_000}, None),
        (1_000_000, 0.0, {"max_tokens": 1_000_000}, "budget used up: 1,000,000 of 1,000,000 tokens"),
        (0, 1.99, {"max_hours": 2.0}, None),
        (0, 2.0, {"max_hours": 2.0}, "budget used up: 2.00 of 2 hours"),
        (10**12, 10.0**6, {}, None),
    ],
)
def test_a_budget_is_used_up_when_it_is_reached(
    tokens: int, hours: float, limits: dict[str, float], reason: str | None
) -> None:
    assert budget_reason(tokens, hours, **limits) == reason  # type: ignore[arg-type]
