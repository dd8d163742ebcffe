"""What is an incident, what cannot be told, and when it is reported: once, and once more when it is over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from daemons.alerts.__main__ import CRASH_LASTS_S, LOOK_EVERY_S, MAX_TEXT_CHARS, Alerts, Incident, incidents, is_well
from daemons.alerts.targets import _WORDS, Message, message
from daemons.quiet import OpenIncident, read_open
from daemons.workspace import DaemonView, RefusedView, RunView, Workspace
from prime_rl.configs.base import ConfigError, build
from prime_rl.configs.reports import ALERT_KINDS, AlertKind, AlertsConfig
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.metrics import Sign, sign_texts
from prime_rl.contract.nodes import SeenNode
from prime_rl.contract.status import NodeStatus, RunState
from prime_rl.trainer.step import not_finite
from prime_rl.utils.process import ProcessId
from prime_rl.utils.text import clean_text
from tests.alerts_support import PROMISE_S, Troubles

NOW = 1000.0
RUN = RunView(
    run_id="run_a",
    state=RunState.ACTIVE,
    step=3,
    max_steps=10,
    reward=0.5,
    reason=None,
    waiting_on=None,
    updated_at=NOW,
    run_idx=0,
    queue_position=None,
    tokens_per_s=None,
    async_level=None,
    policy_version=None,
    lr=None,
    bottleneck=None,
    model=None,
    batch_size=None,
    num_restarts=0,
    added_at=None,
)


def daemon(name: str, state: str = "running", **fields: Any) -> DaemonView:
    texts = {"waiting_on": None, "reason": None, "log_tail": (), **fields}
    return DaemonView(name=clean_text(name), state=clean_text(state), pid=1, updated_at=NOW, num_restarts=0, **texts)


SERVICES = (daemon("supervisor"), daemon("trainer"), daemon("inference"))


def workspace(*runs: RunView, daemons: tuple[DaemonView, ...] = SERVICES, refused: str | None = None) -> Workspace:
    refusals = (RefusedView(clean_text("run_link"), clean_text(refused)),) if refused else ()
    return Workspace(Path("out"), runs, refusals, daemons, 2, 1, None, None, True, None, NOW)


def node(*, silent_s: float = 0.0, loop_still_s: float = 0.0, **fields: Any) -> SeenNode:
    status = NodeStatus(rank=1, host="gpu7", phase=10, state="working", heartbeat_s=1.0, loop=5, progress=7)
    status.loop_still_s = loop_still_s
    return SeenNode(status, silent_s=silent_s, still_s=0.0, **({"has_moved": True, "has_worked": True} | fields))


def with_daemon(name: str, state: str, **fields: Any) -> Workspace:
    return workspace(RUN, daemons=(*(each for each in SERVICES if each.name != name), daemon(name, state, **fields)))


def text(value: str) -> Any:
    return clean_text(value)


def wrong(*args: Any) -> list[Incident]:
    return [each for each in incidents(*args) if each.is_proven]


NOT_FINITE = not_finite("run_a", 3, "its loss or gradient", float("nan"), 1.0, 1e-4)

NO_GRADIENT = Sign("no_gradient", 0.0, 1e-6, 28)
COLLAPSED = Sign("reward_collapsed", 0.1, 0.8, 3)  # it has a kind of its own

CASES: list[tuple[AlertKind, str, str, Workspace, list[SeenNode], int]] = [
    ("run_failed", "run_a", "boom", workspace(replace(RUN, state=RunState.FAILED, reason=text("boom"))), [], 10),
    ("run_invalid", "run_a", "lr", workspace(replace(RUN, state=RunState.INVALID, reason=text("lr"))), [], 10),
    ("run_invalid", "run_link", "a link", workspace(refused="a link"), [], 10),
    ("run_evicted", "run_a", "asked", workspace(replace(RUN, state=RunState.EVICTED, reason=text("asked"))), [], 10),
    (
        "run_not_finite",
        "run_a",
        NOT_FINITE,
        workspace(replace(RUN, state=RunState.EVICTED, reason=text(NOT_FINITE))),
        [],
        10,
    ),
    (
        "run_stalled",
        "run_a",
        "hangs; it waits for an answer",
        workspace(replace(RUN, stalled_since=1.0, reason=text("hangs"), waiting_on=text("an answer"))),
        [],
        10,
    ),
    (
        "run_trouble",
        "run_a",
        f"a step hangs; {sign_texts([NO_GRADIENT], 'run_a')[0]}",
        workspace(replace(RUN, problem=text("a step hangs"), signs=(COLLAPSED, NO_GRADIENT))),
        [],
        10,
    ),
    (
        "run_trouble",
        "run_a",
        "restart loop: run_a; edited, not in effect: seed 1 -> 2",
        workspace(
            replace(RUN, crash_loop=text("restart loop: run_a"), edited=text("edited, not in effect: seed 1 -> 2"))
        ),
        [],
        10,
    ),
    (
        "daemon_crashed",
        "trainer",
        "backoff: exit code 1",
        with_daemon("trainer", "backoff", reason="exit code 1"),
        [],
        10,
    ),
    ("daemon_crashed", "trainer", "failed: no config", with_daemon("trainer", "failed", reason="no config"), [], 10),
    ("daemon_crashed", "supervisor", "lost: gone", with_daemon("supervisor", "lost", reason="gone"), [], 10),
    ("daemon_crashed", "run_a", "running: it ended", with_daemon("run_a", "running", crashed_at=NOW - 1), [], 10),
    (
        "daemon_stalled",
        "inference",
        "no turn; it waits for a lock",
        with_daemon("inference", "stalled", reason="no turn", waiting_on="a lock"),
        [],
        10,
    ),
    ("node_lost", "node 1", "no heartbeat for 20 s; gpu7, phase 10 (train)", workspace(), [node(silent_s=20.0)], 10),
    ("daemon_stalled", "node 1", "stands still; gpu7, phase 10 (train)", workspace(), [node(loop_still_s=9e9)], 10),
    ("disk_low", "disk", "1.0 GB free, less than 5 GB", workspace(), [], 1),
    ("clocks", "clocks", "a; b", replace(workspace(), clocks=(text("a"), text("b"))), [], 10),
    (
        "daemon_crashed",
        "inference",
        "running: restart loop: x; its log ends with: y",
        with_daemon("inference", "running", crash_loop="restart loop: x", crashed_at=NOW - 300, log_tail=("y",)),
        [],
        10,
    ),
]


@pytest.mark.parametrize(
    ("kind", "subject", "words", "seen", "nodes", "free_gb"),
    CASES,
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_what_is_wrong_is_one_incident_that_says_why(
    kind: AlertKind, subject: str, words: str, seen: Workspace, nodes: list[SeenNode], free_gb: int
) -> None:
    found = wrong(seen, nodes, free_gb * 10**9, 5.0)
    assert [(each.kind, each.subject, each.text) for each in found] == [(kind, subject, words)]


def test_every_kind_has_a_case_and_words() -> None:
    assert {case[0] for case in CASES} | {"reward_collapsed"} == set(ALERT_KINDS) == set(get_args(AlertKind))
    assert set(_WORDS) == {*ALERT_KINDS, "test"}


def test_nothing_is_wrong_with_what_works() -> None:
    told_of_its_run = with_daemon("run_a", "running", crash_loop="restart loop: x")
    assert incidents(told_of_its_run, [node()], 10**11, 5.0) == []
    crashed_long_ago = with_daemon("trainer", "running", crashed_at=NOW - CRASH_LASTS_S)
    for seen in (workspace(RUN), crashed_long_ago, workspace(replace(RUN, state=RunState.FINISHED))):
        assert incidents(seen, [node()], 10**11, 5.0) == []
        assert is_well(seen)


def test_a_lost_supervisor_is_one_incident_and_not_one_for_each_of_its_daemons() -> None:
    daemons = tuple(daemon(name, "lost") for name in ("supervisor", "trainer", "inference", "run_a"))
    seen = workspace(RUN, daemons=daemons)
    assert [each.subject for each in wrong(seen, [], 10**11, 5.0)] == ["supervisor"]
    assert not is_well(seen)


def test_text_of_a_run_is_one_clean_line_of_limited_length() -> None:
    seen = workspace(replace(RUN, state=RunState.FAILED, reason=text("a\nb" + "c" * 5000)))
    (found,) = wrong(seen, [], 10**11, 5.0)
    assert "\n" not in found.text and len(found.text) <= MAX_TEXT_CHARS


UNPROVEN: list[tuple[str, Workspace, list[SeenNode], int | None, set[str]]] = [
    ("a node that was seen once", workspace(), [node(has_moved=False)], 10, {"node_lost", "daemon_stalled"}),
    ("a node that is late", workspace(), [node(silent_s=4.0)], 10, {"node_lost", "daemon_stalled"}),
    ("the work of a dead node", workspace(), [node(silent_s=20.0)], 10, {"daemon_stalled"}),
    ("work that was not seen to move", workspace(), [node(has_worked=False)], 10, {"daemon_stalled"}),
    ("a daemon that starts", with_daemon("trainer", "starting"), [], 10, {"daemon_crashed", "daemon_stalled"}),
    (
        "all but a lost supervisor",
        with_daemon("supervisor", "lost"),
        [],
        10,
        {"daemon_crashed", "daemon_stalled", "run_stalled", "run_trouble"},
    ),
    (
        "without a trainer",
        workspace(replace(RUN, state=RunState.STOPPED)),
        [],
        10,
        {"run_invalid", "run_stalled", "run_trouble"},
    ),
    ("a disk that does not answer", workspace(), [], None, {"disk_low"}),
    ("clocks on a disk that takes nothing", replace(workspace(), disk=text("full")), [], 10, {"clocks"}),
]


def test_a_daemon_that_stalls_in_a_restart_loop_is_both() -> None:
    found = wrong(with_daemon("trainer", "stalled", crash_loop="restart loop: x"), [], 10**11, 5.0)
    assert {each.kind for each in found} == {"daemon_crashed", "daemon_stalled"}


@pytest.mark.parametrize(("seen", "nodes", "free_gb", "kinds"), [each[1:] for each in UNPROVEN], ids=lambda each: "")
def test_what_cannot_be_told_is_neither_wrong_nor_right(
    seen: Workspace, nodes: list[SeenNode], free_gb: int | None, kinds: set[str]
) -> None:
    found = incidents(seen, nodes, free_gb and free_gb * 10**9, 5.0)
    assert {each.kind for each in found if not each.is_proven} == kinds


class Recorder:
    """A target that keeps what it is given."""

    name = "recorder"

    def __init__(self) -> None:
        self.got: list[Message] = []

    def put(self, note: Message) -> None:
        self.got.append(note)

    def changes(self) -> list[tuple[str, str]]:
        return [(each["kind"], each["state"]) for note in self.got for each in note["alerts"]]


class Looks(Alerts):
    """Sees the given snapshots instead of a folder's."""

    def __init__(self, folder: Path, *targets: Any, heart: Any = None, **config: Any) -> None:
        settings = AlertsConfig(output_dir=folder, min_free_gb=0, **config)
        super().__init__(settings, targets, heart, clock=lambda: self.now, keep_stack=self.keep)
        self.now, self.stacks = NOW, list[tuple[str, int]]()

    def keep(self, name: str, process: ProcessId) -> None:
        self.stacks.append((name, process.pid))

    def see(self, *snapshots: Workspace) -> None:
        for snapshot in snapshots:
            self._reader.read = lambda snapshot=snapshot, **kwargs: snapshot  # type: ignore[method-assign]
            self.look()


FAILED = workspace(replace(RUN, state=RunState.FAILED, reason=text("boom")))


def test_an_incident_is_reported_once_and_its_end_once(tmp_path: Path) -> None:
    target = Recorder()
    looks = Looks(tmp_path, target)
    looks.see(FAILED)
    assert target.got == [], "only what two looks have seen"
    looks.see(FAILED, FAILED, FAILED)
    assert target.changes() == [("run_failed", "open")]
    assert target.got[0]["text"] == "run_a failed: boom"
    looks.see(workspace(RUN))
    assert len(target.got) == 1
    looks.see(workspace(RUN), workspace(RUN))
    assert target.changes() == [("run_failed", "open"), ("run_failed", "over")]
    assert target.got[1]["text"] == "over: run_a failed: boom"


def test_what_is_seen_at_one_look_only_is_not_reported(tmp_path: Path) -> None:
    target = Recorder()
    Looks(tmp_path, target).see(*[FAILED, workspace(RUN)] * 5)
    assert target.got == []


def test_a_new_start_reports_nothing_again_and_the_end_of_what_ended_meanwhile(tmp_path: Path) -> None:
    Looks(tmp_path, Recorder()).see(FAILED, FAILED)
    assert list(read_open(OutputDir(tmp_path))) == ["run_failed run_a"]
    target = Recorder()
    looks = Looks(tmp_path, target)
    looks.see(FAILED, FAILED)
    looks = Looks(tmp_path, target)
    looks.see(workspace(RUN))
    assert target.got == [], "only what two looks have seen"
    looks.see(workspace(RUN))
    assert target.changes() == [("run_failed", "over")]
    assert read_open(OutputDir(tmp_path)) == {}


def test_what_cannot_be_told_stays_as_it_is(tmp_path: Path) -> None:
    target = Recorder()
    looks = Looks(tmp_path, target)
    looks.see(*[with_daemon("trainer", "backoff")] * 2)
    looks.see(*[with_daemon("supervisor", "lost")] * 3, *[with_daemon("trainer", "starting")] * 3)
    lost = [("daemon_crashed", "open"), ("daemon_crashed", "open"), ("daemon_crashed", "over")]
    assert target.changes() == lost and list(read_open(looks.output)) == ["daemon_crashed trainer"]
    looks.see(workspace(RUN), with_daemon("trainer", "starting"), workspace(RUN))
    assert target.changes() == lost, "right at two looks in a row"
    looks.see(workspace(RUN))
    assert target.changes() == [*lost, ("daemon_crashed", "over")]


def test_each_kind_arrives_once_in_time_and_its_end_once_over_two_restarts(tmp_path: Path) -> None:
    """On files, by the daemon's own clocks: what is measured is the number of its looks."""
    now = NOW
    troubles, target = Troubles(OutputDir(tmp_path), clock=lambda: now), Recorder()

    def live(num_looks: int, **config: Any) -> list[tuple[str, str]]:
        """One life of the daemon, or the rest of one; returns the changes that it told."""
        nonlocal now, alerts
        if config or alerts is None:
            alerts = Alerts(troubles.config(**config), [target], clock=lambda: now, steady=lambda: now)
        before = len(target.changes())
        for _ in range(num_looks):
            troubles.beat()
            alerts.look()
            now += LOOK_EVERY_S
        return sorted(target.changes()[before:])

    alerts: Alerts | None = None
    in_time, disk_is_low = int(PROMISE_S / LOOK_EVERY_S) - 1, {"min_free_gb": 1e9}  # it may come just after a look
    others = sorted(kind for kind in ALERT_KINDS if kind != "disk_low")
    assert live(in_time, **disk_is_low) == [("disk_low", "open")]
    for kind in others:
        troubles.cause(kind)
    assert live(in_time) == [(kind, "open") for kind in others]
    assert live(20, **disk_is_low) == []
    for kind in others:
        troubles.mend(kind)
    assert live(in_time) == [(kind, "over") for kind in others]
    assert live(in_time, min_free_gb=0.0) == [("disk_low", "over")] and live(20) == []
    subjects = {each["kind"]: each["subject"] for note in target.got for each in note["alerts"]}
    assert subjects == {kind: troubles.subject(kind) for kind in ALERT_KINDS}


def test_what_arrives_is_noted_already_and_arrives_also_when_the_disk_is_full(tmp_path: Path) -> None:
    noted: list[set[str]] = []

    class Target(Recorder):
        def put(self, note: Message) -> None:
            super().put(note)
            noted.append(set(read_open(OutputDir(tmp_path))))

    looks = Looks(tmp_path, target := Target())
    looks.see(FAILED, FAILED)
    assert noted == [{"run_failed run_a"}]
    looks.output.alerts_open.unlink()
    looks.output.alerts_open.mkdir()  # it cannot be written
    looks.see(workspace(RUN), workspace(RUN))
    assert target.changes() == [("run_failed", "open"), ("run_failed", "over")]


def test_only_the_chosen_kinds_are_reported(tmp_path: Path) -> None:
    target = Recorder()
    Looks(tmp_path, target, kinds=["run_evicted"]).see(FAILED, FAILED)
    assert target.got == []


def test_the_dead_man_hears_as_long_as_the_daemons_work(tmp_path: Path) -> None:
    heart = Recorder()
    looks = Looks(tmp_path, heart=heart, dead_man_s=60)
    looks.see(FAILED, FAILED)
    assert len(heart.got) == 1, "a run that failed does not stop it"
    looks.now += 59
    looks.see(workspace(RUN))
    assert len(heart.got) == 1
    looks.now += 1
    looks.see(with_daemon("trainer", "stalled"))
    assert len(heart.got) == 1
    looks.see(workspace(RUN))
    assert len(heart.got) == 2


def test_the_stack_of_what_stalls_is_kept(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    looks.see(*[with_daemon("trainer", "stalled")] * 3)
    assert looks.stacks == [("trainer", 1)]


def test_a_message_has_a_line_for_each_alert() -> None:
    first, second = (OpenIncident("run_failed", f"run_{name}", "boom", NOW) for name in "ab")
    note = message(Path("/w"), [first], [second], NOW + 5)
    assert note["text"].splitlines() == ["run_a failed: boom", "over: run_b failed: boom"]
    assert (note["version"], note["workspace"], note["at"]) == (1, "/w", NOW + 5)
    assert [each["state"] for each in note["alerts"]] == ["open", "over"]


@pytest.mark.parametrize("table", [{"webhooks": ["ftp://x"]}, {"apprise": ["slack"]}, {"kinds": ["run_fails"]}])
def test_a_wrong_table_is_refused_by_name(table: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(table))):
        build(AlertsConfig, table, "system.toml")


def test_the_variables_of_the_targets_are_known() -> None:
    config = AlertsConfig(webhooks=["$ONE", "https://x/$TWO"], apprise=["$THREE"], dead_man_url="$ONE")
    assert config.variables() == ["ONE", "THREE"]
