"""Monitors one by one, with the real packages: what they are fed, what is left out, what each writes."""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import pytest

from prime_rl.configs.base import ConfigError, build
from prime_rl.configs.monitors import MonitorConfig, PrometheusConfig, TensorBoardConfig, WandbConfig
from prime_rl.contract.files import append_line
from prime_rl.contract.layout import RunDir
from prime_rl.orchestrator.monitors.base import Monitor
from prime_rl.orchestrator.monitors.feed import MAX_FIGURES, MonitorFeed
from prime_rl.orchestrator.monitors.prometheus import PrometheusMonitor
from prime_rl.orchestrator.monitors.tensorboard import TensorBoardMonitor
from prime_rl.orchestrator.monitors.wandb import WandbMonitor
from tests.orchestrator_support import make_run, publish
from tests.patience import PATIENCE_S
from tests.text_attacks import ATTACKS, check_clean, texts


class Recorder:
    """A monitor that fails where a test asks."""

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


def fed(run: RunDir, *monitors: Monitor) -> MonitorFeed:
    feed = MonitorFeed(run, monitors)
    feed.start({"seed": 1})
    feed.forward()
    return feed


def test_whole_lines_of_both_writers_are_passed_on_once_with_numbers_only(run: RunDir) -> None:
    monitor = Recorder()
    write(run, "orchestrator", 1, **{"reward/mean": 0.5, "bottleneck": "none", "reward/std": None})
    feed = fed(run, monitor)
    with run.trainer_metrics.open("w") as file:
        file.write('{"step": 1, "loss": 0.25')
    feed.forward()
    assert monitor.calls == [("run_a", {"seed": 1}), (1, {"orchestrator/reward/mean": 0.5})]
    with run.trainer_metrics.open("a") as file:
        file.write("}\nno line\n")
    feed.forward()
    feed.forward()
    assert monitor.calls[2:] == [(1, {"trainer/loss": 0.25})]
    feed.close()
    assert monitor.calls[3:] == ["close"]


def test_a_feed_that_starts_again_goes_on_after_the_last_line(run: RunDir) -> None:
    write(run, "orchestrator", 1, x=1)
    write(run, "trainer", 1, x=2)
    fed(run, Recorder())  # and killed: it is never closed
    write(run, "trainer", 2, x=3)
    monitor = Recorder()
    feed = fed(run, monitor)
    assert monitor.calls[1:] == [(2, {"trainer/x": 3})]
    run.trainer_metrics.unlink()
    write(run, "trainer", 1, x=4)
    feed.forward()
    assert monitor.calls[2:] == [(1, {"trainer/x": 4})], "another file is read from its start"


@pytest.mark.parametrize("state", ["", "[]", "{", '{"trainer": "x"}', '{"trainer": 999999}'])
def test_a_damaged_state_costs_repeated_lines_at_most(run: RunDir, state: str) -> None:
    write(run, "trainer", 1, x=1)
    run.monitors.mkdir()
    (run.monitors / "state.json").write_text(state)
    monitor = Recorder()
    fed(run, monitor)
    assert monitor.calls[1:] == [(1, {"trainer/x": 1})]


def test_a_monitor_that_fails_is_named_once_and_the_others_go_on(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    good, late = Recorder(), Recorder("late", fails_once_at_step=2)
    never, at_the_end = Recorder("never", fails_at="start"), Recorder("at_the_end", fails_at="close")
    feed = fed(run, late, never, at_the_end, good)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3, 4):
            write(run, "trainer", step, x=step)
        feed.forward()
        feed.close()
    assert [step for step, _ in good.calls[1:-1]] == [1, 2, 3, 4]
    assert [step for step, _ in late.calls[1:-1]] == [1, 2]
    assert never.calls[1:] == ["close"]
    assert all(monitor.calls[-1] == "close" for monitor in (good, late, never, at_the_end))
    said = [record.getMessage() for record in caplog.records]
    assert "late is disabled: ConnectionError: service is away" in said
    assert sum("late" in line for line in said) == 1


def test_a_disk_that_does_not_take_the_state_costs_no_figure(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    (run.monitors / "state.json" / "in the way").mkdir(parents=True)
    monitor = Recorder()
    feed = fed(run, monitor)
    for step in (1, 2):
        write(run, "trainer", step, x=step)
        feed.forward()
    assert monitor.calls[1:] == [(1, {"trainer/x": 1}), (2, {"trainer/x": 2})]
    assert len(caplog.messages) == 1 and "may repeat lines" in caplog.messages[0]


def test_the_trainers_last_line_is_known_to_be_missing(run: RunDir) -> None:
    write(run, "trainer", 1, x=1)
    run.broadcast.mkdir()
    publish(run, 1)
    feed = fed(run, Recorder())
    assert not feed.is_behind_trainer
    publish(run, 2)
    assert feed.is_behind_trainer
    write(run, "trainer", 2, x=1)
    feed.forward()
    assert not feed.is_behind_trainer
    assert not fed(run, Recorder()).is_behind_trainer, "also after a start that finds no new line"


def test_a_port_is_waited_for_until_the_monitors_of_a_killed_orchestrator_are_gone(run: RunDir) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    with ThreadPoolExecutor() as threads:
        started = threads.submit(fed, run, PrometheusMonitor(PrometheusConfig(port=port)))
        assert not wait([started], timeout=0.3).done
        taken.close()
        feed = started.result(timeout=PATIENCE_S)
    assert httpx.get(f"http://127.0.0.1:{port}/metrics").status_code == 200
    feed.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_tensorboard_reads_back_every_figure_over_two_starts(run: RunDir) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step in (1, 2, 3):
        write(run, "orchestrator", step, **{"reward/mean": step / 10})
        if step != 2:
            fed(run, TensorBoardMonitor(TensorBoardConfig(), run.monitors)).close()
    events = EventAccumulator(str(run.monitors / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["orchestrator/reward/mean"]
    found = [(event.step, round(event.value, 6)) for event in events.Scalars("orchestrator/reward/mean")]
    assert found == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_prometheus_scrapes_the_newest_figures_on_loopback(run: RunDir) -> None:
    monitor = PrometheusMonitor(PrometheusConfig())
    feed = fed(run, monitor)
    for step in (1, 2):
        write(run, "orchestrator", step, **{"reward/reverse-text": step / 4})
    write(run, "trainer", 1, loss=-1.5)
    feed.forward()
    host, port = monitor._server.server_address
    assert host == "127.0.0.1"
    page = httpx.get(f"http://{host}:{port}/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    values = [line for line in page.text.splitlines() if not line.startswith("#")]
    assert sorted(values) == [
        'prl_orchestrator_reward_reverse_text{run_id="run_a"} 0.5',
        'prl_orchestrator_step{run_id="run_a"} 2.0',
        'prl_trainer_loss{run_id="run_a"} -1.5',
        'prl_trainer_step{run_id="run_a"} 1.0',
    ]
    feed.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{host}:{port}/metrics")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
@pytest.mark.parametrize("attack", [*ATTACKS, "label"])
def test_names_that_attack_reach_no_monitor_as_they_are(tmp_path: Path, attack: str) -> None:
    """Names of metrics, of the run, and texts of its config. A label of Prometheus must not end before its end."""
    from prometheus_client.parser import text_string_to_metric_families
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    text = ATTACKS.get(attack, '{}"} 1\\\nforged{x="\\"').replace("{}", "shown")[:10_000]
    run = RunDir(tmp_path / f"run_{text.replace('/', '').replace(chr(0), '')[:60]}")
    run.metrics.mkdir(parents=True)
    monitor, recorder = PrometheusMonitor(PrometheusConfig()), Recorder()
    tensorboard = TensorBoardMonitor(TensorBoardConfig(), run.monitors)
    feed = MonitorFeed(run, [monitor, recorder, tensorboard])
    feed.start({text: [text]})
    for writer in ("orchestrator", "trainer"):
        for step in (1, 2):
            many = {f"{step}/{number}/{'many' * 50}": number for number in range(600)}
            write(run, writer, step, **{text: 0.5, f"eval/{text}/reward": 0.25}, **many)
    feed.forward()
    page = httpx.get(f"http://127.0.0.1:{monitor._server.server_port}/metrics").text
    feed.close()
    handed = check_clean("a monitor", iter((page, *texts(recorder.calls))))
    events = EventAccumulator(str(run.monitors / "tensorboard"))
    check_clean("tensorboard", iter(events.Reload().Tags()["scalars"]))
    families = list(text_string_to_metric_families(page))
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["run_id"] for sample in samples} == {recorder.calls[0][0]}
    assert 900 < len(samples) <= MAX_FIGURES + 2 and max(len(sample.name) for sample in samples) < 200
    assert all(name.startswith("prl_") for name in (family.name for family in families))
    assert len({name for _, metrics in recorder.calls[1:-1] for name in metrics}) == MAX_FIGURES
    assert "shown" in handed or attack in ("title", "title, other end"), "nothing was attacked"


def test_a_port_in_use_leaves_prometheus_out_and_nothing_else(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        write(run, "trainer", 1, x=1)
        other = Recorder()
        feed = fed(run, PrometheusMonitor(PrometheusConfig(port=taken.getsockname()[1]), patience_s=0), other)
        feed.close()
    assert other.calls[1:] == [(1, {"trainer/x": 1}), "close"]
    assert caplog.messages == ["prometheus is disabled: OSError: [Errno 98] Address already in use"]


@pytest.mark.parametrize(
    ("package", "monitor"),
    [
        ("wandb", lambda folder: WandbMonitor(WandbConfig(mode="offline"), folder)),
        ("tensorboard", lambda folder: TensorBoardMonitor(TensorBoardConfig(), folder)),
    ],
)
def test_a_missing_package_is_one_line_that_says_what_to_install(
    run: RunDir, package: str, monitor: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    fed(run, monitor(run.monitors)).close()
    assert caplog.messages == [
        f"{package} is disabled: MonitorError: the package {package} is not installed: "
        "pip install prl-multirun[monitors]"
    ]


@pytest.mark.parametrize(
    ("bad", "key"),
    [
        ({"wandb": {"mode": "dryrun"}}, "wandb.mode"),
        ({"wandb": {"project": "a/b"}}, "wandb.project"),
        ({"prometheus": {"port": 70000}}, "prometheus.port"),
        ({"mlflow": {}}, "mlflow"),
    ],
)
def test_a_wrong_monitor_is_refused_by_its_key(bad: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        build(MonitorConfig, bad, "test")
