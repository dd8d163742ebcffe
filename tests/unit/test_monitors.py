"""Feeds and monitors one by one, with the real packages: what they are fed, what is left out, what each writes."""

from __future__ import annotations

import json
import logging
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from daemons.actions import delete_run, undelete_run
from daemons.monitors.__main__ import MAX_FIGURES, Feed, Monitors, Positions
from daemons.monitors.services import (
    MAX_LIVES,
    KeptIds,
    Monitor,
    PrometheusMonitor,
    PrometheusPage,
    TensorBoardMonitor,
    TrackioMonitor,
    WandbMonitor,
)
from prime_rl.configs.reports import MonitorsConfig, PrometheusConfig, TensorBoardConfig, TrackioConfig, WandbConfig
from prime_rl.contract.files import append_line, wait_for
from prime_rl.contract.layout import OutputDir, RunDir
from tests.budgets import in_full
from tests.orchestrator_support import make_run
from tests.page_attacks import answered, ask
from tests.patience import PATIENCE_S, until_seen
from tests.text_attacks import ATTACKS, check_clean, texts


class Recorder:
    """A monitor that fails where a test asks."""

    wants_all = True

    def __init__(self, name: str = "recorder", fails_at: str = "", fails_once_at_step: int = 0) -> None:
        self.name = name
        self.calls: list[Any] = []
        self._fails_at = fails_at
        self._fails_once_at_step = fails_once_at_step

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        self._note("start", (run_id, dict(config)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._note("log", (step, dict(metrics)))
        if step == self._fails_once_at_step:
            raise ConnectionError("service\nis away")

    def close(self) -> None:
        self._note("close", "close")

    def _note(self, what: str, call: Any) -> None:
        self.calls.append(call)
        if what == self._fails_at:
            raise RuntimeError(f"no {what}")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path)
    run.metrics.mkdir()
    return run


def write(run: RunDir, writer: str, step: int, **values: Any) -> None:
    path = run.trainer_metrics if writer == "trainer" else run.orchestrator_metrics
    append_line(path, json.dumps({"step": step, "time": 5.0, **values}))


class Feeds:
    """Starts feeds of a run, and ends them after the test."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.feeds: list[Feed] = []

    def start(self, *monitors: Monitor, positions: Positions | None = None) -> list[Feed]:
        positions = positions or Positions(self.run)
        new = [Feed(self.run, monitor, {"seed": 1}, positions, poll_s=0.02) for monitor in monitors]
        self.feeds += new
        return new

    def end(self) -> None:
        """Each passes on what there is and closes its monitor."""
        for feed in self.feeds:
            feed.stop()
        wait_for(lambda: all(feed.is_over for feed in self.feeds), "the feeds to end", timeout_s=PATIENCE_S)


@pytest.fixture
def feeds(run: RunDir) -> Iterator[Feeds]:
    found = Feeds(run)
    yield found
    found.end()


def test_whole_lines_of_both_writers_are_passed_on_once_with_numbers_only(run: RunDir, feeds: Feeds) -> None:
    monitor = Recorder()
    write(run, "orchestrator", 1, **{"reward/mean": 0.5, "bottleneck": "none", "reward/std": None})
    with run.trainer_metrics.open("w") as file:
        file.write('{"step": 1, "loss": 0.25')
    feeds.start(monitor)
    until_seen(lambda: len(monitor.calls) > 1, "the first line")
    assert monitor.calls == [("run_a", {"seed": 1}), (1, {"orchestrator/reward/mean": 0.5})]
    with run.trainer_metrics.open("a") as file:
        file.write("}\nno line\n")
    until_seen(lambda: len(monitor.calls) > 2, "the line to be passed on when it is whole")
    feeds.end()
    assert monitor.calls[2:] == [(1, {"trainer/loss": 0.25}), "close"]


def test_a_feed_that_starts_again_goes_on_after_the_last_line(run: RunDir, feeds: Feeds) -> None:
    write(run, "orchestrator", 1, x=1)
    write(run, "trainer", 1, x=2)
    feeds.start(Recorder())
    feeds.end()
    write(run, "trainer", 2, x=3)
    monitor, newcomer = Recorder(), Recorder("newcomer")
    feeds.start(monitor, newcomer)
    until_seen(lambda: len(monitor.calls) > 1 and len(newcomer.calls) > 3, "the new line")
    assert monitor.calls[1:] == [(2, {"trainer/x": 3})]
    assert len(newcomer.calls) == 4, "each has its own place"
    run.trainer_metrics.unlink()
    write(run, "trainer", 1, x=4)
    until_seen(lambda: len(monitor.calls) > 2, "the line of another file")
    assert monitor.calls[2:] == [(1, {"trainer/x": 4})], "another file is read from its start"


@pytest.mark.parametrize(
    "state", ["", "[]", "{", '{"recorder": "x"}', '{"recorder": {"trainer": 999999}}', "[" * 9999], ids=range(6)
)
def test_a_damaged_state_costs_repeated_lines_at_most(run: RunDir, feeds: Feeds, state: str) -> None:
    write(run, "trainer", 1, x=1)
    run.monitors.mkdir()
    (run.monitors / "state.json").write_text(state)
    monitor = Recorder()
    feeds.start(monitor)
    feeds.end()
    assert monitor.calls[1:] == [(1, {"trainer/x": 1}), "close"]


def test_a_monitor_that_fails_is_named_once_and_the_others_go_on(
    run: RunDir, feeds: Feeds, caplog: pytest.LogCaptureFixture
) -> None:
    good, late = Recorder(), Recorder("late", fails_once_at_step=2)
    never, at_the_end = Recorder("never", fails_at="start"), Recorder("at_the_end", fails_at="close")
    with caplog.at_level(logging.WARNING):
        started = feeds.start(late, never, at_the_end, good)
        for step in (1, 2, 3, 4):
            write(run, "trainer", step, x=step)
        feeds.end()
    assert [feed.failed for feed in started] == [True, True, False, False]
    assert [step for step, _ in good.calls[1:-1]] == [1, 2, 3, 4]
    assert [step for step, _ in late.calls[1:-1]] == [1, 2]
    assert never.calls[1:] == ["close"]
    assert all(monitor.calls[-1] == "close" for monitor in (good, late, never, at_the_end))
    said = [record.getMessage() for record in caplog.records]
    assert "run_a: late is disabled: ConnectionError: service is away" in said
    assert sum("late" in line for line in said) == 1
    again = Recorder("late")
    feeds.start(again)
    feeds.end()
    assert [step for step, _ in again.calls[1:-1]][-3:] == [2, 3, 4], "what failed gets what it missed at a new start"


def test_a_monitor_that_hangs_holds_up_neither_the_others_nor_the_end(run: RunDir, feeds: Feeds) -> None:
    class Hanging(Recorder):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            released.wait()

    released = threading.Event()
    monitor, hanging = Recorder(), Hanging("hanging")
    write(run, "trainer", 1, x=1)
    try:
        (stuck,) = feeds.start(hanging)
        until_seen(lambda: stuck.called_at is not None and len(hanging.calls) == 1, "the call")
        feeds.start(monitor)
        until_seen(lambda: len(monitor.calls) > 1, "the other monitor to be fed")
        stuck.stop()
        kept = json.loads((run.monitors / "state.json").read_text())
        assert not stuck.is_over and kept.get("hanging", {}).get("trainer", 0) == 0
    finally:
        released.set()


def test_a_disk_that_does_not_take_the_state_costs_no_figure(
    run: RunDir, feeds: Feeds, caplog: pytest.LogCaptureFixture
) -> None:
    (run.monitors / "state.json" / "in the way").mkdir(parents=True)
    monitor = Recorder()
    feeds.start(monitor)
    for step in (1, 2):
        write(run, "trainer", step, x=step)
        until_seen(lambda step=step: len(monitor.calls) > step, "the line")  # type: ignore[misc]
    feeds.end()
    assert monitor.calls[1:-1] == [(1, {"trainer/x": 1}), (2, {"trainer/x": 2})]
    assert len(caplog.messages) == 1 and "may repeat lines" in caplog.messages[0]


def test_the_place_of_a_deleted_run_is_not_kept_in_the_folder_of_its_successor(run: RunDir, feeds: Feeds) -> None:
    write(run, "trainer", 1, x=1)
    monitor = Recorder()
    (feed,) = feeds.start(monitor)
    size = run.trainer_metrics.stat().st_size
    until_seen(lambda: Positions(run).of("recorder").get("trainer") == size, "its place to be kept")
    run.path.rename(run.path.with_name("deleted"))
    run.metrics.mkdir(parents=True)
    until_seen(lambda: feed.is_over, "the feed to end")
    assert monitor.calls[-1] == "close" and not run.monitors.exists()


@pytest.mark.parametrize("during", ["start", "log"])
def test_no_line_of_a_successor_is_passed_on_as_a_line_of_the_run_before(
    run: RunDir, feeds: Feeds, during: str
) -> None:
    class Replacing(Recorder):
        def _note(self, what: str, call: Any) -> None:
            super()._note(what, call)
            if what == during:
                run.path.rename(run.path.with_name("deleted"))
                run.metrics.mkdir(parents=True)
                write(run, "trainer", 2, x=2)

    write(run, "orchestrator", 1, x=1)  # is read before the trainer's file
    monitor = Replacing()
    (feed,) = feeds.start(monitor)
    until_seen(lambda: feed.is_over, "the feed to end")
    ours = [(1, {"orchestrator/x": 1.0})] if during == "log" else []
    assert monitor.calls[1:] == [*ours, "close"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_tensorboard_reads_back_every_figure_over_two_starts(run: RunDir, feeds: Feeds) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step in (1, 2, 3):
        write(run, "orchestrator", step, **{"reward/mean": step / 10})
        if step != 2:
            feeds.start(TensorBoardMonitor(TensorBoardConfig(), run.monitors))
            feeds.end()
    events = EventAccumulator(str(run.monitors / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["orchestrator/reward/mean"]
    found = [(event.step, round(event.value, 6)) for event in events.Scalars("orchestrator/reward/mean")]
    assert found == [(1, 0.1), (2, 0.2), (3, 0.3)]


@pytest.fixture
def page() -> Iterator[PrometheusPage]:
    found = PrometheusPage(PrometheusConfig())
    found.open()
    yield found
    found.close()


def values_on(page: PrometheusPage) -> list[str]:
    return sorted(
        line for line in httpx.get(page.url, timeout=PATIENCE_S).text.splitlines() if not line.startswith("#")
    )


def test_prometheus_scrapes_the_newest_figures_of_all_runs_on_loopback(
    tmp_path: Path, run: RunDir, feeds: Feeds, page: PrometheusPage
) -> None:
    other = make_run(tmp_path, "run_b")
    other.metrics.mkdir()
    others = Feeds(other)
    for step in (1, 2):
        write(run, "orchestrator", step, **{"reward/reverse-text": step / 4})
    write(run, "trainer", 1, loss=-1.5)
    write(other, "trainer", 7, loss=2.0)
    feeds.start(PrometheusMonitor(page))
    others.start(PrometheusMonitor(page))
    until_seen(lambda: len(values_on(page)) == 6, "the figures of both runs")
    assert page.url.startswith("http://127.0.0.1:")
    of_other = ['prl_trainer_loss{run="run_b"} 2.0', 'prl_trainer_step{run="run_b"} 7.0']
    assert values_on(page) == sorted(
        [
            'prl_orchestrator_reward_reverse_text{run="run_a"} 0.5',
            'prl_orchestrator_step{run="run_a"} 2.0',
            'prl_trainer_loss{run="run_a"} -1.5',
            'prl_trainer_step{run="run_a"} 1.0',
            *of_other,
        ]
    )
    assert httpx.get(page.url, timeout=PATIENCE_S).headers["content-type"].startswith("text/plain")
    feeds.end()
    assert values_on(page) == of_other
    feeds.start(PrometheusMonitor(page))
    until_seen(lambda: len(values_on(page)) == 6, "what was there before a new start")
    others.end()


def test_the_page_is_not_for_pages_of_other_sites(page: PrometheusPage) -> None:
    port = int(page.url.rpartition(":")[2].partition("/")[0])
    assert answered(port, "/metrics") == []
    assert ask(port, "GET", "/metrics", {"Host": f"localhost:{port}"})[0] == 200


def test_a_page_of_a_run_alone_ends_with_it(run: RunDir, feeds: Feeds, caplog: pytest.LogCaptureFixture) -> None:
    page = PrometheusPage(PrometheusConfig())
    feeds.start(PrometheusMonitor(page, is_own=True))
    until_seen(lambda: page.is_open, "the page")
    url = page.url
    assert httpx.get(url, timeout=PATIENCE_S).status_code == 200
    with socket.create_server(("127.0.0.1", 0)) as taken:
        own = PrometheusPage(PrometheusConfig(port=taken.getsockname()[1]))
        feeds.start(PrometheusMonitor(own, is_own=True))
        feeds.end()
    assert caplog.messages == ["run_a: prometheus is disabled: OSError: [Errno 98] Address already in use"]
    assert not page.is_open
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
@pytest.mark.parametrize("attack", ["label", "lines", *in_full(*(each for each in ATTACKS if each != "lines"))])
def test_names_that_attack_reach_no_monitor_as_they_are(tmp_path: Path, page: PrometheusPage, attack: str) -> None:
    """Names of metrics, of the run, and texts of its config. A label of Prometheus must not end before its end."""
    from prometheus_client.parser import text_string_to_metric_families
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    text = ATTACKS.get(attack, '{}"} 1\\\nforged{x="\\"').replace("{}", "shown")[:10_000]
    run = RunDir(tmp_path / f"run_{text.replace('/', '').replace(chr(0), '')[:60]}")
    run.metrics.mkdir(parents=True)
    recorder, tensorboard = Recorder(), TensorBoardMonitor(TensorBoardConfig(), run.monitors)
    feeds = [
        Feed(run, monitor, {text: [text]}, Positions(run), poll_s=0.02)
        for monitor in (PrometheusMonitor(page), recorder, tensorboard)
    ]

    def scraped() -> str:
        return httpx.get(page.url, timeout=PATIENCE_S).text

    for writer in ("orchestrator", "trainer"):
        for step in (1, 2):
            many = {f"{step}/{number}/{'many' * 50}": number for number in range(600)}
            write(run, writer, step, **{text: 0.5, f"eval/{text}/reward": 0.25}, **many)
    last = re.compile(r"^prl_trainer_step{.*} 2\.0$", re.MULTILINE)  # the trainer's lines come after the others
    until_seen(lambda: len(recorder.calls) > 4 and last.search(scraped()) is not None, "the lines")
    shown = scraped()
    for feed in feeds:
        feed.stop()
    until_seen(lambda: all(feed.is_over for feed in feeds), "the feeds to end")
    handed = check_clean("a monitor", iter((shown, *texts(recorder.calls))))
    events = EventAccumulator(str(run.monitors / "tensorboard"))
    check_clean("tensorboard", iter(events.Reload().Tags()["scalars"]))
    families = list(text_string_to_metric_families(shown))
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {recorder.calls[0][0]}
    assert 1_900 < len(samples) <= 2 * (MAX_FIGURES + 1) and max(len(sample.name) for sample in samples) < 200
    assert all(name.startswith("prl_") for name in (family.name for family in families))
    assert len({name for _, metrics in recorder.calls[1:-1] for name in metrics}) == 2 * MAX_FIGURES
    assert "shown" in handed or attack in ("title", "title, other end"), "nothing was attacked"


@pytest.mark.parametrize(
    ("package", "monitor"),
    [
        ("wandb", lambda run, ids: WandbMonitor(WandbConfig(mode="offline"), run, ids)),
        ("tensorboard", lambda run, ids: TensorBoardMonitor(TensorBoardConfig(), run.monitors)),
        ("trackio", lambda run, ids: TrackioMonitor(TrackioConfig(), run, ids, run.monitors / "trackio")),
    ],
)
def test_a_missing_package_is_one_line_that_says_what_to_install(
    run: RunDir,
    feeds: Feeds,
    package: str,
    monitor: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for variable in ("TRACKIO_DIR", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(variable, "")  # set by the monitor of trackio, and here restored
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    feeds.start(monitor(run, KeptIds(OutputDir(run.path.parent))))
    feeds.end()
    assert caplog.messages == [
        f"run_a: {package} is disabled: MonitorError: the package {package} is not installed: "
        'pip install "prl-multirun[monitors]"'
    ]


SERVICES = ("wandb", "trackio")


def plant(run: RunDir, known: str) -> None:
    """Write an id for each service where earlier versions kept it."""
    run.monitors.mkdir(exist_ok=True)
    for service in SERVICES:
        (run.monitors / f"{service}_id.txt").write_text(known)


@pytest.mark.parametrize("service", SERVICES)
def test_a_run_keeps_its_id_whatever_its_folder_says_and_wherever_the_workspace_moves(
    tmp_path: Path, service: str
) -> None:
    output = OutputDir(tmp_path / "out")
    output.path.mkdir()
    run, other = make_run(output.path, "run_a"), make_run(output.path, "run_b")
    plant(other, "0" * 16)  # of a record that this workspace does not know
    ids = KeptIds(output)
    of_run, of_other = ids.of(service, run), ids.of(service, other)
    assert len({of_run, of_other, "0" * 16}) == 3
    output.own_status("monitors").touch()  # the daemon has worked here
    plant(other, of_run)
    other.life.write_bytes(run.life.read_bytes())
    assert KeptIds(output).of(service, other) not in (of_run, of_other), "another life, but never another run"
    output.path.rename(tmp_path / "moved")
    moved = OutputDir(tmp_path / "moved")
    run = moved.run("run_a")
    assert KeptIds(moved).of(service, run) == of_run
    delete_run(moved.path, "run_a")
    successor = make_run(moved.path, "run_a")
    plant(successor, of_run)
    assert KeptIds(moved).of(service, successor) != of_run
    successor.path.rename(tmp_path / "gone")
    undelete_run(moved.path, "run_a")
    assert KeptIds(moved).of(service, run) == of_run


@pytest.mark.parametrize("service", SERVICES)
def test_ids_of_earlier_versions_are_taken_over_once_from_those_that_alone_have_them(
    tmp_path: Path, service: str
) -> None:
    output = OutputDir(tmp_path)
    output.own_status("monitors").parent.mkdir(parents=True)
    output.own_status("monitors").touch()
    runs = {name: make_run(tmp_path, f"run_{name}") for name in "abcde"}
    for name, known in {"a": "a" * 16, "b": "b" * 16, "c": "c" * 16, "d": "b" * 16, "e": "c" * 16}.items():
        plant(runs[name], known)
    delete_run(tmp_path, "run_a")
    delete_run(tmp_path, "run_c")
    KeptIds(output).of(service, runs["b"])
    plant(runs["d"], "d" * 16)
    undelete_run(tmp_path, "run_a")
    undelete_run(tmp_path, "run_c")
    ids = KeptIds(output)
    assert ids.of(service, runs["a"]) == "a" * 16
    found = {ids.of(service, runs[name]) for name in "bcde"}
    assert len(found) == 4 and not found & {letter * 16 for letter in "abcd"}


def test_ids_that_are_damaged_cost_new_records_and_are_not_sought_in_runs(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    output = OutputDir(run.path.parent)
    before = KeptIds(output).of("wandb", run)
    output.own_status("monitors").touch()
    plant(run, "0" * 16)
    output.monitor_ids.write_text('{"wandb/run_a')
    after = KeptIds(output).of("wandb", run)
    assert after not in (before, "0" * 16) and "is damaged" in caplog.text
    assert KeptIds(output).of("wandb", run) == after


def test_ids_that_cannot_be_read_or_kept_for_now_cost_no_other_monitor(run: RunDir) -> None:
    output = OutputDir(run.path.parent)
    output.monitor_ids.mkdir(parents=True)  # no file
    ids = Monitors(output, MonitorsConfig())._ids
    with pytest.raises(OSError, match=r"ids\.json"):
        ids.of("wandb", run)
    output.monitor_ids.rmdir()
    assert ids.of("wandb", run) == KeptIds(output).of("wandb", run)


def test_a_run_that_takes_ever_new_lives_crowds_out_its_own_alone(run: RunDir) -> None:
    output = OutputDir(run.path.parent)
    other, ids = make_run(output.path, "run_b"), KeptIds(output)
    of_other = ids.of("wandb", other)
    for number in range(MAX_LIVES + 5):
        run.life.write_text(str(number))
        newest = ids.of("wandb", run)
    again = KeptIds(output)
    assert (again.of("wandb", other), again.of("wandb", run)) == (of_other, newest)
    assert len(json.loads(output.monitor_ids.read_text())) == MAX_LIVES + 1
