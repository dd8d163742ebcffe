"""The supervisor's decisions over generated histories: a small world with a clock, and a process as it likes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from daemons.decide import LIVE, LOOP_TIMES, LOOP_WAITS, MAX_CRASHES_KEPT, Daemon, Do, Seen, Snapshot, State, decide
from daemons.specs import DaemonSpec
from prime_rl.configs.system import SupervisorConfig
from prime_rl.contract.status import LOST_AFTER_S
from prime_rl.utils.process import ProcessId
from tests.budgets import examples

CONFIG = SupervisorConfig(
    start_timeout_s=30, drain_s=20, grace_s=5, backoff_s=1, max_backoff_s=8, early_crash_s=10, max_early_crashes=3
)
SPECS = (DaemonSpec("trainer", ("t",), Path("t.log")), DaemonSpec("run_a", ("o",), Path("o.log"), "run_a"))


@dataclass
class World:
    """One daemon, and what truly happens to its process. The checks are made as each action is carried out."""

    spec: DaemonSpec
    config: SupervisorConfig
    now: float = 1000.0
    daemon: Daemon | None = None
    lives: bool = False
    pid: int = 0
    num_kills: int = 0
    ended_at: float = 0.0

    def step(self, event: Event) -> None:
        self.now += event.after_s
        if self.lives and event.ends:
            self.lives, self.ended_at = False, self.now
        seen = replace(event.seen, lives=self.lives, exit_code=None if self.lives else event.exit_code)
        daemons = {self.spec.name: self.daemon} if self.daemon else {}
        wanted = {self.spec.name: self.spec} if event.wanted else {}
        asked = frozenset({self.spec.name} if event.asked else ())
        actions = decide(Snapshot(wanted, daemons, {self.spec.name: seen}, asked, self.config), self.now)
        assert len(actions) <= 1
        for action in actions:
            self._check(action.do, action.daemon, event)
            self._carry_out(action.do, action.daemon)

    def _check(self, do: Do, after: Daemon, event: Event) -> None:
        before = self.daemon
        if do is Do.START:
            assert not self.lives, "never two processes of one daemon"
            assert before is None or before.state in (State.BACKOFF, State.FAILED, State.DONE)
            if before is not None and before.state is State.FAILED:
                assert event.asked, "what has failed is left alone until a person asks"
            if before is not None and before.state is State.BACKOFF:
                assert event.asked or self.now >= before.retry_at
            assert event.wanted
            assert before is None or not event.seen.left, "never beside what is left of the last start"
        if do in (Do.TERM, Do.KILL):
            assert self.lives and before is not None
        if do is Do.KILL:
            assert before is not None and before.state is State.STOPPING and before.killed_at is None
            assert self.now - before.stop_at >= min(self.config.grace_s, self.config.drain_s)
        if do is Do.TERM and not event.asked and not event.seen.evicted and not event.seen.gone:
            assert before is not None
            stalled = self.config.stall.of(self.spec.kind).restart
            never_ready = before.state is State.STARTING and not event.seen.ready
            not_asked_for = not event.wanted and self.spec.run_id is None
            assert stalled or never_ready or not_asked_for, "a stall ends a daemon only where that is configured"
        if after.state is State.BACKOFF and do is Do.CLEAN:
            assert 0 <= after.retry_at - self.now <= self.config.max_backoff_s
        assert after.num_early_ends < self.config.max_early_crashes or after.state is State.FAILED
        assert len(after.crashes) <= MAX_CRASHES_KEPT
        assert list(after.crashes) == sorted(after.crashes, key=lambda crash: crash.at)

    def _carry_out(self, do: Do, after: Daemon) -> None:
        if do is Do.FORGET:
            self.daemon = None
            return
        if do is Do.START:
            self.lives, self.pid = True, self.pid + 1
            after = replace(after, process=ProcessId(self.pid, self.now))
        if do is Do.KILL:
            self.lives = False
        self.daemon = after
        assert (after.process is not None) == (after.state in LIVE)


@dataclass(frozen=True)
class Event:
    """What happens until the next look."""

    after_s: float
    ends: bool
    exit_code: int
    wanted: bool
    asked: bool
    seen: Seen


SEEN = st.builds(
    Seen,
    ready=st.booleans(),
    waiting_on=st.sampled_from([None, "rollouts of run_a"]),
    heartbeat_age_s=st.sampled_from([None, 0.0, LOST_AFTER_S + 1, 5000.0]),
    still_s=st.sampled_from([None, 0.0, 5000.0]),
    loop_still_s=st.sampled_from([None, None, 20.0, 5000.0]),
    left=st.sampled_from([frozenset[int]()] * 4 + [frozenset({7})]),
    final_state=st.sampled_from([None, None, None, "finished", "evicted", "failed"]),
    evicted=st.sampled_from([False, False, False, True]),
    gone=st.sampled_from([False] * 9 + [True]),
)
EVENTS = st.builds(
    Event,
    after_s=st.sampled_from([0.25, 1.0, 3.0, 11.0, 40.0]),
    ends=st.booleans(),
    exit_code=st.sampled_from([0, 1, 2, -9, -11]),
    wanted=st.sampled_from([True, True, True, False]),
    asked=st.sampled_from([False] * 9 + [True]),
    seen=SEEN,
)


@settings(max_examples=examples(300))
@given(spec=st.sampled_from(SPECS), restart=st.booleans(), events=st.lists(EVENTS, max_size=60))
def test_no_history_makes_twins_or_wakes_what_has_failed(spec: DaemonSpec, restart: bool, events: list[Event]) -> None:
    stall = {"limit_s": 60, "restart": restart}
    world = World(spec, CONFIG.replace(stall={"trainer": stall, "orchestrator": stall}))
    for event in events:
        world.step(event)


@settings(max_examples=examples(100))
@given(uptimes=st.lists(st.sampled_from([0.5, 9.0, 11.0, 500.0]), max_size=40))
def test_the_wait_after_a_crash_doubles_up_to_its_limit_and_is_forgotten_after_a_long_life(
    uptimes: list[float],
) -> None:
    world = World(SPECS[0], CONFIG)
    ready = Seen(ready=True, heartbeat_age_s=0.0)
    wait_s = 0.0
    num_early = num_looped = 0
    for uptime_s in uptimes:
        quiet = Event(max(wait_s, 0.25), ends=False, exit_code=0, wanted=True, asked=False, seen=ready)
        world.step(quiet)
        assert world.lives
        world.step(replace(quiet, after_s=0.0))
        world.step(replace(quiet, after_s=uptime_s, ends=True, exit_code=-9))
        assert world.daemon is not None
        num_early = num_early + 1 if uptime_s < CONFIG.early_crash_s else 0
        num_looped = num_looped + 1 if uptime_s < LOOP_WAITS * CONFIG.max_backoff_s else 0
        if num_early == CONFIG.max_early_crashes or num_looped == LOOP_TIMES * CONFIG.max_early_crashes:
            assert world.daemon.state is State.FAILED
            return
        expected = min(2 * wait_s, CONFIG.max_backoff_s) if uptime_s < CONFIG.max_backoff_s and wait_s else 1.0
        wait_s = world.daemon.retry_at - world.now
        assert wait_s == expected


@settings(max_examples=examples(100))
@given(events=st.lists(EVENTS, max_size=30))
def test_whatever_happened_a_quiet_world_comes_to_rest(events: list[Event]) -> None:
    world = World(SPECS[0], CONFIG)
    for event in events:
        world.step(event)
    calm = Event(1.0, ends=False, exit_code=-9, wanted=True, asked=False, seen=Seen(ready=True, heartbeat_age_s=0.0))
    for _ in range(200):
        stopping = world.daemon is not None and world.daemon.state is State.STOPPING
        world.step(replace(calm, ends=stopping))
    assert world.daemon is not None
    assert world.daemon.state in (State.RUNNING, State.FAILED)
