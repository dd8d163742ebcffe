"""The readers of growing files: nothing lost, nothing twice, nothing that a file does stops them."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.metrics import parse_metrics
from prime_rl.contract.status import RunStatus
from prime_rl.utils.tail import CHUNK_BYTES, MAX_LINE_BYTES, FileTail, TailRead, whole_lines
from tests.budgets import examples
from tui.readers.charts import NUM_RECENT, History, HistoryReader, RunMetrics
from tui.readers.run_config import MAX_EVENTS, MAX_SERVICE_EVENTS, EventsReader, toml_text
from tui.readers.workspace_metrics import CurvesReader, CurvesRequest, RunTail

# Lines without the newline byte; the text around chunk ends is where a reader breaks.
LINES = st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"?")), max_size=30)


def drain(tail: FileTail) -> tuple[list[bytes], bool]:
    lines: list[bytes] = []
    reset = False
    while True:
        read = tail.read()
        reset |= read.reset
        lines += read.lines
        if not read.more:
            return lines, reset


@settings(max_examples=examples(80))
@given(lines=LINES, cuts=st.lists(st.integers(0, 1300), max_size=8), chunk=st.integers(1, 64))
def test_whole_lines_come_once_and_in_order_however_the_file_grows(
    lines: list[bytes], cuts: list[int], chunk: int
) -> None:
    data = b"".join(line + b"\n" for line in lines)
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut <= len(data))})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        tail = FileTail(path, chunk_bytes=chunk)
        found: list[bytes] = []
        for start, end in itertools.pairwise(bounds):
            with path.open("ab") as file:
                file.write(data[start:end])
            new, reset = drain(tail)
            assert not reset
            found += new
            assert b"".join(line + b"\n" for line in found) == data[: data.rfind(b"\n", 0, end) + 1]
    assert found == lines


def test_the_lines_of_a_file_end_where_it_ended_and_of_a_huge_one_the_last_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * 99 + b"\n")
    found = 0
    for _ in FileTail(path, chunk_bytes=100).lines():
        found += 1
        with path.open("ab") as file:  # by one who writes as fast as it is read
            file.write(b"x" * 99 + b"\n")
    assert found == 1
    with path.open("r+b") as file:
        file.truncate(1 << 42)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast\n")
    monkeypatch.setattr("prime_rl.utils.tail.MAX_WHOLE_BYTES", 1 << 20)
    assert list(whole_lines(path)) == [b"last"]


@pytest.mark.parametrize("from_old", [False, True])
def test_files_that_change_places_while_they_are_read_are_read_no_further_than_the_first(
    tmp_path: Path, from_old: bool
) -> None:
    """Also when each is put aside as a log is that is rotated."""
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    path.write_bytes(b"a" * 99 + b"\n" + b"a" * 999 + b"\n")
    other.write_bytes(b"b" * 99 + b"\n" + b"b" * 999 + b"\n")
    num_reads = 0

    class Swapped(FileTail):
        def read(self) -> TailRead:
            nonlocal num_reads
            num_reads += 1
            found = super().read()
            if num_reads < 100:  # then they rest, or reading would never end
                put_aside = tmp_path / ("metrics.jsonl.1" if from_old else "aside")
                path.rename(put_aside)
                other.rename(path)
                shutil.copyfile(put_aside, other)
            return found

    first, *_ = Swapped(path, chunk_bytes=1000).lines()
    assert first == b"a" * 99 and num_reads <= 3


@settings(max_examples=examples(80))
@given(before=LINES, after=LINES, in_place=st.booleans())
def test_another_file_under_the_name_is_read_from_its_start(
    before: list[bytes], after: list[bytes], in_place: bool
) -> None:
    first = b"".join(b"a" + line + b"\n" for line in before)
    second = b"".join(b"b" + line + b"\n" for line in after)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(first)
        tail = FileTail(path)
        drain(tail)
        if in_place:  # cut and grown again, also past the old size: the inode stays
            path.write_bytes(second)
        else:
            other = Path(folder) / "other"
            other.write_bytes(second)
            os.replace(other, path)
        lines, reset = drain(tail)
    assert lines == [b"b" + line for line in after]
    assert reset == (not in_place or bool(first))


def test_an_unfinished_last_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one\ntw")
    tail = FileTail(path)
    assert tail.read().lines == [b"one"]
    assert tail.read().lines == []
    with path.open("ab") as file:
        file.write(b"o\n")
    assert tail.read().lines == [b"two"]


def test_a_file_that_goes_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "f"
    tail = FileTail(path)
    assert tail.read().lines == [] and not tail.read().reset
    path.write_bytes(b"one\n")
    assert tail.read().lines == [b"one"]
    path.unlink()
    assert tail.read().reset
    assert not tail.read().reset
    path.write_bytes(b"two\n")
    assert tail.read().lines == [b"two"]


def test_a_folder_or_an_unreadable_path_is_no_file(tmp_path: Path) -> None:
    assert FileTail(tmp_path).read().lines == []
    assert FileTail(tmp_path / "none" / "f").read().lines == []


def test_a_line_without_end_is_dropped_and_memory_stays_bounded(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * (3 * MAX_LINE_BYTES) + b"\nshort\n")
    tail = FileTail(path, chunk_bytes=64 * 1024)
    lines = []
    for _ in range(100):
        read = tail.read()
        lines += read.lines
        assert len(tail._partial) <= MAX_LINE_BYTES
        if not read.more:
            break
    assert lines == [b"short"]


def test_a_long_file_is_shown_from_near_its_end(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"".join(b"line %06d\n" % number for number in range(1000)))
    assert drain(FileTail(path, start_bytes=25))[0] == [b"line 000998", b"line 000999"]
    assert drain(FileTail(path, start_bytes=24))[0] == [b"line 000998", b"line 000999"]
    assert len(drain(FileTail(path, start_bytes=10**6))[0]) == 1000


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"null", b"[1]", b'"step"', b'{"loss": 1}', b'{"step": "3"}', b'{"step": true}', b'{"step": -1}',
     b"\xff\xfe", b"[" * 100_000, b'{"step": 1e400}', b'{"step": NaN}'],
)  # fmt: skip
def test_what_is_no_metrics_line_is_none(line: bytes) -> None:
    assert parse_metrics(line) is None


def test_a_metrics_line_keeps_its_finite_numbers() -> None:
    assert parse_metrics(b'{"step": 3, "loss": 0.5, "n": 2, "s": "x", "b": true, "l": [1]}') == (
        3,
        {"loss": 0.5, "n": 2},
    )
    assert parse_metrics(b'{"step": 3, "loss": NaN, "lr": 0.1}') == (3, {"lr": 0.1})
    assert parse_metrics(b'{"step": 3, "loss": 1%s}' % (b"0" * 400)) == (3, {})


def points(history: History) -> tuple[list[float], list[float]]:
    return list(history.steps), list(history.values)


def test_metrics_of_both_files_by_name(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run_a")
    run.metrics.mkdir(parents=True)
    run.orchestrator_metrics.write_text('{"step": 1, "loss": 9}\nbroken {\n{"step": 2, "reward/mean": 0.1}\n')
    run.trainer_metrics.write_text('{"step": 1, "reward/mean": 7, "time": 1790000000.123, "eval/a/reward": 1}\n')
    metrics = RunMetrics(run, ("reward/mean", "loss", "time"), 16, newest_bytes=1 << 10)
    assert metrics.update() == (True, False)
    found = {key: points(history) for key, history in metrics.histories().items()}
    assert found == {"reward/mean": ([2], [0.1]), "loss": ([1], [9]), "time": ([1], [1790000000.123])}, "exact"
    assert metrics.update() == (False, False)


def test_the_newest_values_of_a_long_history_are_never_thinned() -> None:
    history = History(4 * NUM_RECENT)
    for step in range(20 * NUM_RECENT):
        history.extend((float(step),), (float(step % 100),))
        assert len(history) <= 4 * NUM_RECENT
        recent = min(step + 1, NUM_RECENT)
        assert history.steps[-recent] == step + 1 - recent, "the steps of the newest values stand without a gap"
    assert history.steps[0] == 0


def test_a_replaced_metrics_file_restarts_its_series(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 9)))
    reader = HistoryReader(path, ["loss"], 16)
    reader.update()
    path.write_text('{"step": 1, "loss": 3.0}\n')
    reader.update()
    assert points(reader.histories["loss"]) == ([1], [3.0])


def test_two_gigabytes_of_nothing_a_megabyte_of_line_and_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with path.open("wb") as file:
        file.truncate(2 << 30)
    tail = FileTail(path, start_bytes=1 << 20)
    assert drain(tail) == ([], False)
    assert len(tail._partial) <= MAX_LINE_BYTES
    with path.open("ab") as file:
        file.write(b"\n" + b"x" * (1 << 20) + b"\nend\n")
    assert drain(tail) == ([b"end"], False)
    path.write_bytes(b"")
    assert drain(tail) == ([], True)
    path.unlink()
    os.mkfifo(path)
    assert drain(tail) == ([], True), "nothing is waited for"


def test_the_newest_values_alone_are_kept_of_the_end_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines = [json.dumps({"step": step, "loss": step + 0.1}) + "\n" for step in range(100)]
    path.write_text("".join(lines[:90]))
    reader = HistoryReader(path, ["loss"], 16, newest_bytes=1 << 10)
    reader.update()
    assert points(reader.histories["loss"]) == (list(range(74, 90)), [step + 0.1 for step in range(74, 90)])
    with path.open("a") as file:
        file.writelines(lines[90:])
    reader.update()
    assert list(reader.histories["loss"].steps) == list(range(84, 100))
    with path.open("a") as file:
        file.writelines(lines[95:97])  # rolled back
    reader.update()
    assert list(reader.histories["loss"].steps) == list(range(84, 97))


def test_the_curves_of_the_selected_run_are_read_when_its_figures_change(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run_a")
    run.metrics.mkdir(parents=True)
    run.orchestrator_metrics.write_text("".join(f'{{"step": {step}, "reward/mean": 0.{step}}}\n' for step in (1, 2)))
    reader = CurvesReader(tmp_path)
    request = CurvesRequest("run_a", RunTail(rewards=(0.1, 0.2)))
    data, more = reader.read(request, lambda: True)
    assert not more
    assert (data.run_id, list(data.reward.curves[0].xs), data.reward.window) == ("run_a", [0, 1], (1, 2))
    assert not data.loss.has_values
    assert reader.read(request, lambda: True) == (data, False), "one that came too late may be asked for again"
    with run.orchestrator_metrics.open("a") as file:
        file.write('{"step": 3, "reward/mean": 0.3}\n')
    data, _ = reader.read(CurvesRequest("run_a", RunTail(rewards=(0.1, 0.2, 0.3))), lambda: True)
    assert data.reward.window == (1, 3)
    other, _ = reader.read(CurvesRequest("run_b"), lambda: True)
    assert other.run_id == "run_b" and not other.reward.has_values


def test_events_found_early_in_a_long_log_are_given_when_all_of_it_is_read(tmp_path: Path) -> None:
    line = "2026-09-21T12:36:49Z INFO    prime_rl.trainer.runs.manager: {} takes slot 0 at step 0\n"
    log = OutputDir(tmp_path).log("trainer")
    log.parent.mkdir(parents=True)
    log.write_text(line.format("run_a") + line.format("run_b") * (CHUNK_BYTES // len(line) + 1))
    reader = EventsReader(tmp_path, "run_a")
    assert reader.read() == (None, True), "one block of it"
    data, more = reader.read()
    assert data is not None and not more
    assert [event.kind for event in data.events] == ["admitted"]
    assert reader.read() == (None, False)
    with log.open("a") as file:
        file.write(line.format("run_a"))
    data, _ = reader.read()
    assert data is not None and len(data.events) == 2


def test_the_end_of_what_all_runs_share_is_an_event_of_a_run_from_its_beginning_on(tmp_path: Path) -> None:
    line = "2026-09-21T12:{}:00Z INFO    supervisor: {}\n"
    log = OutputDir(tmp_path).log("supervisor")
    log.parent.mkdir(parents=True)
    said = ["trainer: backoff (killed by SIGKILL, exit code -9)", "run_a: pid 7", "trainer: pid 8", "trainer: running"]
    said += ["trainer: backoff (killed by SIGKILL, exit code -9)", "inference: failed (3 early crashes)", "run_b: done"]
    log.write_text("".join(line.format(10 + number, words) for number, words in enumerate(said)))
    data, _ = EventsReader(tmp_path, "run_a").read()
    assert data is not None
    whole = [
        ("started", "pid 7"),
        ("restart", "trainer: killed by SIGKILL, exit code -9"),
        ("failed", "inference: 3 early crashes"),
    ]
    assert [(event.kind, event.text) for event in data.events] == whole[:1], "it has not gone on since"
    run = RunDir(tmp_path / "run_a")
    run.control.mkdir(parents=True)
    write_atomic(run.status, msgspec.json.encode(RunStatus(run_id="run_a", state="running", updated_at=1.8e9)))
    reader = EventsReader(tmp_path, "run_a")
    data, _ = reader.read()
    assert data is not None and [(event.kind, event.text) for event in data.events][:3] == whole
    with log.open("a") as file:
        file.write("".join(line.format(20, "inference: backoff (exit code 1)") for _ in range(2 * MAX_EVENTS)))
    data, _ = reader.read()
    assert data is not None and [event.kind for event in data.events].count("started") == 1, "its own are not lost"
    assert len(data.events) == MAX_SERVICE_EVENTS + 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e15, "1e+15"), (1e-5, "1e-05"), (3e-4, "0.0003"), (1e5, "100000.0"), (2e6, "2e+06"), (1234567.0, "1234567.0"),
     (1.0, "1.0"), (10**15, str(10**15)), (float("inf"), "inf"), (True, "true"), ("1e15", '"1e15"')],
)  # fmt: skip
def test_values_of_a_config_are_short_and_exact(value: object, text: str) -> None:
    assert toml_text(value) == text
