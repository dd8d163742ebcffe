"""The supervisor's decisions, replayed with a clock of our own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path

from daemons.decide import (
    LOADS_WITHIN_S,
    LOOP_TIMES,
    LOOP_WAITS,
    MAX_CRASHES_KEPT,
    Action,
    Daemon,
    Do,
    Seen,
    Snapshot,
    State,
    decide,
)
from daemons.process import KILL_WAIT_S
from daemons.specs import DaemonSpec
from prime_rl.configs.system import SupervisorConfig
from prime_rl.contract.notes import Item, Work
from prime_rl.contract.status import LOST_AFTER_S, TAKES_ITS_SHARE
from prime_rl.utils.process import ProcessId

TRAINER = DaemonSpec("trainer", ("t",), Path("t.log"))
RUN = DaemonSpec("run_a", ("o",), Path("o.log"), "run_a")
CONFIG = SupervisorConfig(
    start_timeout_s=100, grace_s=10, backoff_s=1, max_backoff_s=8, early_crash_s=10, max_early_crashes=3
)
READY = Seen(lives=True, ready=True, heartbeat_age_s=0.0)


@dataclass
class History:
    """One daemon over time: `see` passes what is seen, and carries out the decision in memory."""

    spec: DaemonSpec = TRAINER
    wanted: bool = True
    now: float = 1000.0
    daemons: dict[str, Daemon] = field(default_factory=dict)
    evicted: list[tuple[str, str]] = field(default_factory=list)

    def see(
        self, seen: Seen | None = None, *, after_s: float = 0.0, asked: bool = False, config: SupervisorConfig = CONFIG
    ) -> list[Do]:
        self.now += after_s
        name = self.spec.name
        snapshot = Snapshot(
            wanted={name: self.spec} if self.wanted else {},
            daemons=dict(self.daemons),
            seen={name: seen} if seen else {},
            requests=frozenset({name} if asked else ()),
            config=config,
        )
        actions = decide(snapshot, self.now)
        for action in actions:
            self._apply(action)
            self.evicted += [action.evicts] if action.evicts else []
        return [action.do for action in actions]

    def _apply(self, action: Action) -> None:
        if action.do is Do.FORGET:
            del self.daemons[self.spec.name]
            return
        started = action.do is Do.START
        self.daemons[self.spec.name] = (
            replace(action.daemon, process=ProcessId(1, self.now)) if started else action.daemon
        )

    @property
    def daemon(self) -> Daemon:
        return self.daemons[self.spec.name]

    def crash(
        self, *, after_s: float, exit_code: int = 1, config: SupervisorConfig = CONFIG, work: Work | None = None
    ) -> list[Do]:
        return self.see(Seen(exit_code=exit_code, work=work), after_s=after_s, config=config)


def running(spec: DaemonSpec = TRAINER) -> History:
    history = History(spec)
    assert history.see() == [Do.START]
    history.see(READY)
    assert history.daemon.state is State.RUNNING
    return history


def test_a_wanted_daemon_is_started_once_and_becomes_running_when_it_is_ready() -> None:
    history = History()
    assert history.see() == [Do.START]
    assert history.see(Seen(lives=True, waiting_on="the model to load"), after_s=5) == [Do.NOTE]
    assert (history.daemon.state, history.daemon.waiting_on) == (State.STARTING, "the model to load")
    assert history.see(READY, after_s=5) == [Do.NOTE]
    assert history.daemon.state is State.RUNNING
    assert history.see(READY, after_s=5) == []


def test_crashes_are_restarted_after_waits_that_double_up_to_their_limit() -> None:
    history = running()
    waits = []
    config = CONFIG.replace(early_crash_s=0.5)
    for _ in range(6):
        history.crash(after_s=1, config=config)
        assert history.daemon.state is State.BACKOFF
        waits.append(history.daemon.retry_at - history.now)
        assert Do.START not in history.see(after_s=waits[-1] - 0.1)
        assert history.see(after_s=0.1) == [Do.START]
        history.see(READY)
    assert waits == [1, 2, 4, 8, 8, 8]
    assert history.daemon.num_restarts == 6


def test_a_daemon_that_ran_well_for_long_starts_again_with_the_shortest_wait() -> None:
    history = running()
    for _ in range(5):
        history.crash(after_s=1000)
        assert history.daemon.retry_at - history.now == CONFIG.backoff_s
        history.see(after_s=CONFIG.backoff_s)
        history.see(READY)


def test_early_crashes_in_a_row_fail_and_only_a_person_starts_it_again() -> None:
    history = History()
    history.see()
    for _ in range(CONFIG.max_early_crashes - 1):
        assert history.crash(after_s=1) == [Do.CLEAN]
        assert history.daemon.state is State.BACKOFF
        assert history.see(after_s=CONFIG.max_backoff_s) == [Do.START]
    history.crash(after_s=1, exit_code=-9)
    assert history.daemon.state is State.FAILED
    assert history.daemon.reason == "3 early crashes in a row, last: killed by signal 9"
    assert history.see(after_s=10_000) == []
    assert history.see(asked=True) == [Do.START]
    assert history.daemon.num_early_ends == 0


def test_a_good_while_between_two_early_crashes_forgives_the_first() -> None:
    history = running()
    history.crash(after_s=1)
    history.see(after_s=8)
    history.see(READY)
    assert history.daemon.num_early_ends == 1
    history.crash(after_s=CONFIG.early_crash_s + 1)
    assert history.daemon.num_early_ends == 0


def test_a_start_that_fails_by_itself_is_no_crash() -> None:
    history = History()
    history.see()
    for _ in range(CONFIG.max_early_crashes):
        history.see(Seen(lives=True), after_s=50)
        history.crash(after_s=1)
        history.see(after_s=CONFIG.max_backoff_s)
    assert history.daemon.state is State.FAILED
    assert history.daemon.reason == "3 failed starts in a row, last: exit code 1"
    assert [crash.kind for crash in history.daemon.crashes] == ["start"] * 3


def test_a_daemon_that_is_killed_while_it_starts_has_crashed_early() -> None:
    history = History()
    history.see()
    history.see(Seen(lives=True), after_s=50)
    history.crash(after_s=1, exit_code=-9)
    assert (history.daemon.num_early_ends, history.daemon.crashes[-1].kind) == (1, "crash")


def test_the_newest_crashes_are_kept_with_their_times() -> None:
    history = running()
    for _ in range(MAX_CRASHES_KEPT + 2):
        history.crash(after_s=1000, exit_code=-11)
        history.see(after_s=CONFIG.max_backoff_s)
        history.see(READY)
    crashes = history.daemon.crashes
    assert len(crashes) == MAX_CRASHES_KEPT and history.daemon.state is State.RUNNING
    assert crashes[-1].at == history.now - CONFIG.max_backoff_s
    assert (crashes[-1].reason, crashes[-1].exit_code) == ("killed by signal 11", -11)
    assert [round(b.at - a.at) for a, b in itertools.pairwise(crashes)] == [1008] * (MAX_CRASHES_KEPT - 1)


def test_a_refused_config_fails_at_once() -> None:
    history = History()
    history.see()
    history.crash(after_s=1, exit_code=2)
    assert history.daemon.state is State.FAILED
    assert "config" in (history.daemon.reason or "")


def test_a_daemon_that_is_not_ready_in_time_is_ended_and_counts_as_crashed() -> None:
    history = History()
    history.see()
    assert history.see(Seen(lives=True, waiting_on="a port"), after_s=100) == [Do.TERM]
    assert history.see(Seen(exit_code=0), after_s=1) == [Do.CLEAN]
    assert history.daemon.state is State.BACKOFF
    assert history.daemon.reason == "not ready within 100 s (it waits for a port)"
    assert history.daemon.num_early_ends == 1


def test_a_trainer_has_its_whole_time_to_start_once_inference_has_its_share_of_their_gpu() -> None:
    history = History()
    history.see()
    assert history.see(Seen(lives=True, waiting_on=TAKES_ITS_SHARE), after_s=5000) == [Do.NOTE]
    assert history.see(Seen(lives=True, waiting_on="the model to load"), after_s=99) == [Do.NOTE]
    assert history.see(Seen(lives=True, waiting_on="the model to load"), after_s=1) == [Do.TERM]


def test_a_daemon_that_works_may_finish_before_it_is_killed() -> None:
    history = running()
    assert history.see(READY, asked=True) == [Do.TERM]
    assert history.see(READY, after_s=CONFIG.drain_s - 1) == []
    assert history.see(READY, after_s=1) == [Do.KILL]
    assert history.see(Seen(exit_code=-9)) == [Do.CLEAN]
    assert history.see() == [Do.START]
    assert (history.daemon.num_restarts, history.daemon.num_early_ends, history.daemon.crashes) == (1, 0, ())


def test_a_silent_daemon_is_stalled_until_it_beats_again() -> None:
    history = running()
    history.see(replace(READY, heartbeat_age_s=LOST_AFTER_S + 1))
    assert history.daemon.state is State.STALLED
    assert history.daemon.stalled_since == history.now - LOST_AFTER_S - 1
    history.see(READY)
    assert (history.daemon.state, history.daemon.reason, history.daemon.stalled_since) == (State.RUNNING, None, None)


def stalling(restart: bool) -> SupervisorConfig:
    return CONFIG.replace(stall={"trainer": {"limit_s": 60, "restart": restart}})


def test_a_daemon_without_progress_is_stalled_since_it_stands_still_and_reported_only_once() -> None:
    history, config = running(), stalling(restart=False)
    assert history.see(replace(READY, still_s=59), after_s=59, config=config) == []
    still_since = history.now - 59
    assert history.see(replace(READY, still_s=60), after_s=1, config=config) == [Do.NOTE]
    assert (history.daemon.state, history.daemon.stalled_since) == (State.STALLED, still_since)
    assert history.see(replace(READY, still_s=100_000), after_s=99_940, config=config) == [], "nor is it ended"
    history.see(READY, config=config)
    assert (history.daemon.state, history.daemon.crashes) == (State.RUNNING, ())


def test_a_stalled_daemon_is_started_again_where_that_is_configured() -> None:
    history, config = running(), stalling(restart=True)
    assert history.see(replace(READY, still_s=61), after_s=100, config=config) == [Do.TERM]
    assert history.see(READY, after_s=CONFIG.grace_s, config=config) == [Do.KILL]
    assert history.crash(after_s=0, exit_code=-9, config=config) == [Do.CLEAN]
    assert (history.daemon.state, history.daemon.num_early_ends) == (State.BACKOFF, 0)
    assert [(crash.kind, crash.reason) for crash in history.daemon.crashes] == [
        ("stall", "no progress for 60 s, since 1970-01-01 00:17:19 UTC")
    ]
    assert history.see(after_s=CONFIG.backoff_s, config=config) == [Do.START]


def test_a_daemon_that_waits_for_another_is_reported_and_never_ended_for_it() -> None:
    history, config = running(), stalling(restart=True)
    waits = replace(READY, still_s=61, waiting_on="rollouts of run_a")
    assert history.see(waits, after_s=100, config=config) == [Do.NOTE]
    assert (history.daemon.state, history.daemon.waiting_on) == (State.STALLED, "rollouts of run_a")
    assert history.see(replace(waits, still_s=10_000), after_s=9_939, config=config) == []


def test_a_frozen_daemon_is_ended_where_that_is_configured_whatever_it_said_last() -> None:
    history, config = running(), stalling(restart=True)
    frozen = replace(READY, heartbeat_age_s=59.0, waiting_on="rollouts of run_a")
    assert history.see(frozen, after_s=59, config=config) == [Do.NOTE]
    assert history.daemon.state is State.STALLED
    assert history.see(replace(frozen, heartbeat_age_s=60.0), after_s=1, config=config) == [Do.TERM]


def test_a_daemon_whose_loop_hangs_is_stalled_since_its_last_turn_and_ended_only_where_that_is_configured() -> None:
    history = running()
    hangs = replace(READY, loop_still_s=700.0, waiting_on="rollouts of run_a")
    assert history.see(hangs, after_s=700.0) == [Do.NOTE]
    assert (history.daemon.state, history.daemon.stalled_since) == (State.STALLED, history.now - 700.0)
    assert history.daemon.reason == "its main loop has not turned since 1970-01-01 00:16:40 UTC"
    assert history.see(replace(hangs, loop_still_s=100_000.0), after_s=99_300.0) == []
    history.see(READY)
    assert (history.daemon.state, history.daemon.reason) == (State.RUNNING, None)
    history = running()
    assert history.see(replace(hangs, loop_still_s=59.0), config=stalling(restart=True)) == [Do.NOTE]
    assert history.see(replace(hangs, loop_still_s=60.0), config=stalling(restart=True)) == [Do.TERM]
    assert history.daemon.stalled_since is not None, "while it is being ended it is no running daemon"


def test_what_survives_sigkill_is_reported_and_not_killed_at_every_look() -> None:
    history = running()
    history.see(READY, asked=True)
    assert history.see(READY, after_s=CONFIG.drain_s) == [Do.KILL]
    killed_at = history.now
    assert history.see(READY, after_s=0.25) == [], "the next look only looks"
    assert history.see(READY, after_s=KILL_WAIT_S - 0.25) == [Do.NOTE]
    assert history.daemon.reason == "process 1 cannot be ended: it hangs in the kernel, SIGKILL was sent"
    assert (history.daemon.state, history.daemon.stalled_since) == (State.STOPPING, killed_at)
    assert history.see(READY, after_s=1000.0) == []
    assert history.see(Seen(exit_code=-9)) == [Do.CLEAN]
    assert history.see() == [Do.START]


def test_nothing_is_started_beside_what_is_left_of_its_last_start() -> None:
    history = running()
    assert history.crash(after_s=100) == [Do.CLEAN]
    left = Seen(exit_code=1, left=frozenset({12, 7}))
    assert history.see(left, after_s=0.25) == [Do.NOTE]
    assert history.daemon.waiting_on == "processes 7, 12 of its last start to end"
    assert history.see(left, after_s=KILL_WAIT_S) == [Do.NOTE]
    assert (history.daemon.waiting_on or "").endswith(" (it hangs in the kernel, SIGKILL was sent)")
    assert history.see(left, asked=True) == [Do.NOTE], "not for a person either"
    assert history.see(Seen(exit_code=1)) == [Do.START], "and then as was asked for"
    assert (history.daemon.waiting_on, history.daemon.killed_at) == (None, None)


def test_a_person_who_asks_for_what_has_failed_is_remembered_while_something_of_it_is_left() -> None:
    history = History()
    history.see()
    history.crash(after_s=1, exit_code=2)
    left = Seen(left=frozenset({7}))
    assert history.see(left) == [Do.NOTE]
    assert history.see(left, asked=True) == [Do.NOTE]
    assert history.see() == [Do.START]


def test_a_daemon_that_is_left_alone_forgets_what_was_left_of_it() -> None:
    history = History()
    history.see()
    history.crash(after_s=1, exit_code=2)
    history.see(Seen(left=frozenset({7})))
    assert history.see(Seen()) == [Do.NOTE]
    assert (history.daemon.state, history.daemon.waiting_on) == (State.FAILED, None)


def test_orchestrators_that_hang_in_their_start_do_not_keep_others_from_theirs() -> None:
    specs = {f"run_{n}": DaemonSpec(f"run_{n}", ("o",), Path("o.log"), f"run_{n}") for n in range(3)}
    config = CONFIG.replace(max_starting=1, start_timeout_s=10_000)
    daemons: dict[str, Daemon] = {}
    started = []
    for now in (1000.0, 1000.0 + LOADS_WITHIN_S - 1.0, 1000.0 + LOADS_WITHIN_S, 1000.0 + 2 * LOADS_WITHIN_S):
        seen = dict.fromkeys(daemons, Seen(lives=True))
        actions = decide(Snapshot(specs, daemons, seen, frozenset(), config), now)
        daemons |= {action.daemon.spec.name: action.daemon for action in actions}
        started.append(sum(action.do is Do.START for action in actions))
    assert started == [1, 0, 1, 1]


def test_only_so_many_orchestrators_start_at_one_time() -> None:
    specs = {f"run_{n}": DaemonSpec(f"run_{n}", ("o",), Path("o.log"), f"run_{n}") for n in range(60)}
    services = {"trainer": TRAINER}
    config = CONFIG.replace(max_starting=5)
    daemons: dict[str, Daemon] = {}
    seen: dict[str, Seen] = {}
    num_looks = most = 0
    while len(daemons) < 61 or any(daemon.state is State.STARTING for daemon in daemons.values()):
        for action in decide(Snapshot({**services, **specs}, daemons, seen, frozenset(), config), 1000.0 + num_looks):
            daemons[action.daemon.spec.name] = action.daemon
        starting = [name for name, daemon in daemons.items() if daemon.state is State.STARTING and daemon.spec.run_id]
        most = max(most, len(starting))
        assert "trainer" in daemons, "services do not wait for their turn"
        seen = dict.fromkeys(daemons, READY)
        num_looks += 1
        assert num_looks < 60
    assert most == 5


def test_a_last_word_ends_an_orchestrator_for_good() -> None:
    for word in ("finished", "evicted", "failed"):
        history = running(RUN)
        history.wanted = False
        assert history.see(Seen(exit_code=1, final_state=word)) == [Do.CLEAN]
        assert (history.daemon.state, history.daemon.reason) == (State.DONE, word)
        assert history.see(after_s=1000) == []


def test_a_readmitted_run_gets_its_orchestrator_again() -> None:
    history = running(RUN)
    history.wanted = False
    history.see(Seen(exit_code=1, final_state="evicted", evicted=True))
    assert history.see(Seen(evicted=True), after_s=5) == []
    history.wanted = True
    assert history.see(after_s=5) == [Do.START]
    assert history.daemon.num_restarts == 0, "what was paused or evicted is not restarted"


def test_a_finished_run_that_was_evicted_and_readmitted_is_done_and_waits_for_nothing() -> None:
    history = running(RUN)
    history.wanted = False
    history.see(Seen(exit_code=0, final_state="finished", has_all_steps=True))
    history.see(Seen(has_all_steps=True), asked=True)
    history.see(Seen(has_all_steps=True), after_s=1)
    assert (history.daemon.state, history.daemon.waiting_on) == (State.DONE, None)
    history.wanted = True  # its last step was raised
    assert history.see() == [Do.START]


def test_a_crashed_orchestrator_waits_for_the_trainer_to_hold_its_run() -> None:
    history = running(RUN)
    history.crash(after_s=60)
    history.wanted = False
    history.see(after_s=60)
    assert (history.daemon.state, history.daemon.waiting_on) == (State.BACKOFF, "the trainer to hold its run in a slot")
    history.wanted = True
    assert history.see() == [Do.START]


def test_an_orchestrator_outlives_a_trainer_that_lists_no_runs() -> None:
    history = running(RUN)
    history.wanted = False
    assert history.see(READY, after_s=1000) == []


def test_an_orchestrator_that_does_not_heed_its_eviction_is_ended() -> None:
    history = running(RUN)
    history.wanted = False
    assert history.see(replace(READY, evicted=True)) == [Do.NOTE]
    assert history.see(replace(READY, evicted=True), after_s=CONFIG.grace_s) == [Do.TERM]
    assert history.see(Seen(exit_code=-15, evicted=True)) == [Do.CLEAN]
    assert history.daemon.state is State.DONE


def test_a_service_ends_when_it_is_no_longer_asked_for_and_starts_again_when_it_is() -> None:
    history = running()
    history.wanted = False
    assert history.see(READY) == [Do.TERM]
    assert history.see(Seen(exit_code=0)) == [Do.CLEAN]
    assert history.daemon.state is State.DONE and history.see(after_s=1000) == []
    history.wanted = True
    assert history.see() == [Do.START]


def test_a_deleted_run_is_ended_and_forgotten() -> None:
    history = running(RUN)
    history.wanted = False
    assert history.see(replace(READY, gone=True)) == [Do.TERM]
    assert history.see(Seen(exit_code=0, gone=True)) == [Do.CLEAN]
    assert history.see(Seen(gone=True)) == [Do.FORGET]
    assert history.daemons == {}


INFERENCE = DaemonSpec("inference", ("i",), Path("i.log"))


def noted(*run_ids: str, **suspects: int) -> Work:
    return Work(items=[Item(run_id, f"served {run_id}@v3") for run_id in run_ids], suspects=suspects)


def dies(history: History, work: Work | None, *, uptime_s: float = 50.0) -> list[tuple[str, str]]:
    """It crashes while it does what is noted, and runs again; returns the runs that are evicted, with the reasons."""
    history.crash(after_s=uptime_s, work=work)
    if history.daemon.state is not State.FAILED:
        history.see(after_s=CONFIG.max_backoff_s)
        history.see(READY)
    evicted, history.evicted = history.evicted, []
    return evicted


def test_a_crash_names_the_newest_version_of_each_run_and_no_more() -> None:
    history = running(INFERENCE)
    items = [Item("run_a", f"{did} run_a@v{version}") for version in (9, 10, 11) for did in ("loaded", "served")]
    dies(history, Work(items=[*items, Item("run_b", "loaded run_b@v2"), Item("", "served the base model")]))
    assert history.daemon.crashes[-1].reason == (
        "exit code 1 while it served run_a@v11 and loaded run_b@v2 and served the base model"
    )


def test_a_run_that_was_alone_in_work_at_its_second_crash_is_evicted() -> None:
    history = running(INFERENCE)
    assert dies(history, noted("run_a", "run_b", "run_bad")) == []
    assert history.daemon.crashes[-1].reason == (
        "exit code 1 while it served run_a@v3 and served run_b@v3 and served run_bad@v3"
    )
    reason = "inference ended twice while it served run_bad@v3, last: exit code 1"
    assert dies(history, noted("run_bad", run_a=1, run_bad=1)) == [("run_bad", reason)]
    trainer = running()
    file = Item("run_a", "read run_a/rollouts/step_1/rollouts.msgpack")
    assert dies(trainer, Work(items=[file])) == []
    ((run_id, reason),) = dies(trainer, Work(items=[file], suspects={"run_a": 1}))
    assert run_id == "run_a" and reason.startswith(f"the trainer ended twice while it {file.what}, last: ")


def test_no_run_is_evicted_for_what_it_was_not_alone_in_work_at() -> None:
    history = running(INFERENCE)
    for work in (
        None,
        noted(),
        noted("run_a"),  # for the first time
        noted("run_a", "run_b", run_a=1, run_b=1),
        noted("run_new", run_a=1),  # a new run, which was not in work at the last crash
        Work(items=[Item("", "served the base model")], suspects={"": 1}),
    ):
        assert dies(history, work, uptime_s=1000.0) == []
    assert dies(history, noted("run_a", "run_b", run_a=1), uptime_s=1000.0) != [], "run_b was in work a while before"


def test_more_deaths_may_be_allowed_and_the_reason_counts_them() -> None:
    config = CONFIG.replace(max_deaths_of_run=3)
    history = running(INFERENCE)
    history.crash(after_s=1000, config=config, work=noted("run_a", run_a=1))
    assert history.evicted == []
    history = running(INFERENCE)
    history.crash(after_s=1000, config=config, work=noted("run_a", run_a=2))
    assert history.evicted[0][1].startswith("inference ended 3 times in a row while it served run_a@v3")


def test_what_a_person_or_a_stall_ended_evicts_no_run() -> None:
    history = running(INFERENCE)
    history.see(READY, asked=True)
    history.see(Seen(exit_code=-9, work=noted("run_a", run_a=1)), after_s=1)
    assert history.evicted == []


def test_a_daemon_that_keeps_crashing_after_it_was_ready_fails_in_the_end() -> None:
    history = running(INFERENCE)
    limit = LOOP_TIMES * CONFIG.max_early_crashes
    for _ in range(limit - 1):
        dies(history, noted())
        assert history.daemon.state is State.RUNNING
    dies(history, noted())
    assert (history.daemon.state, history.daemon.reason) == (
        State.FAILED,
        f"{limit} crashes in a row, last: exit code 1",
    )
    assert history.see(asked=True) == [Do.START]
    assert history.daemon.num_looped == 0


def test_a_crash_after_a_long_life_and_the_eviction_of_a_run_begin_the_count_again() -> None:
    history = running(INFERENCE)
    limit = LOOP_TIMES * CONFIG.max_early_crashes
    for _ in range(3):
        for _ in range(limit - 1):
            dies(history, noted())
        dies(history, noted(), uptime_s=LOOP_WAITS * CONFIG.max_backoff_s)
        assert (history.daemon.state, history.daemon.num_looped) == (State.RUNNING, 0)
    for run_id in ("run_a", "run_b", "run_c"):
        for _ in range(limit - 2):
            dies(history, noted())
        assert dies(history, noted(run_id, **{run_id: 1}))
        assert (history.daemon.state, history.daemon.num_looped) == (State.RUNNING, 1)


def test_a_server_that_ends_by_itself_at_its_first_request_has_crashed_though_it_was_never_seen_ready() -> None:
    history = History(INFERENCE)
    history.see()
    history.crash(after_s=1, work=noted("run_a", run_a=1))
    assert (history.daemon.crashes[-1].kind, [run_id for run_id, _ in history.evicted]) == ("crash", ["run_a"])
