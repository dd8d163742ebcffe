"""MultiRunManager: the runs of one trainer process, their slots, and the hooks for runs that come and go.

Rank 0 looks at the disk (`discover_runs`); all ranks then take over what it found (`synchronize_state`). The hooks of
one look are called in this order:

    rank 0      forgotten (every run that leaves), config validation (every config that is new), discovered
    all ranks   deletion (every run that left), creation (every run that came)

each kind in the order of registration. What belongs to one run may fail: the run is evicted with the reason written
down and the others go on.

Everything that a run has is its `TrainerRun`. What the trainer itself does with a run that comes or goes is one call
each of its `RunLife`, before the hooks, which are for those who build on the manager. It reaches adapters only through
layers that registered themselves, and a whole model, where that is trained, as their stand-in.

What happens when a hook fails depends on its kind: a config is invalid, a run that comes is evicted, a run that leaves
leaves anyway. The names of hooks are in the reasons that people read.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from prime_rl.configs.admitted import read_effect, write_admitted
from prime_rl.configs.base import ConfigError
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.validate import TrainerLimits, check_against_trainer, resolve
from prime_rl.contract.files import disk_trouble, remove_file
from prime_rl.contract.layout import RunDir
from prime_rl.lora.linear import MultiLoRALinear
from prime_rl.trainer.runs.discovery import Candidate, Discovery, Evictions, Findings, preempted
from prime_rl.trainer.runs.run import Leaving, Progress, SlotAdapters, Slots, SlotWeights, TrainerRun
from prime_rl.trainer.runs.sync import Channel, HookReport, SlotState, StateMessage, slot_changes
from prime_rl.utils.text import error_text

# The slot and the run: called on all ranks when a run is created or deleted, and on rank 0 when it is forgotten.
RunHook = Callable[[int, str], None]
# The slot, the run and its config: called on rank 0 when a run is admitted, before any rank creates it.
DiscoveredHook = Callable[[int, str, OrchestratorConfig], None]
# The verdict on a new config of any run: (True, "") or (False, what people read of what is wrong).
ConfigValidationHook = Callable[[OrchestratorConfig], tuple[bool, str]]


class RunLife:
    """The calls of the trainer itself for a run that comes or goes. By default nothing: there is only a manager."""

    def admitted(self, run: TrainerRun) -> None:
        """Rank 0, before any rank creates the run. What it raises refuses the run."""

    def created(self, run: TrainerRun) -> None:
        """All ranks, after the run's parameters were reset. What it raises on one rank refuses the run on all.

        No collective: the ranks agree on whether it failed when all are through.
        """

    def may_leave(self, run: TrainerRun) -> bool:
        """Rank 0: whether a run that is to leave its slot can leave it now; asked at every look.

        It sees to it that one that is `Leaving.SAVED` is saved.
        """
        return True

    def forgotten(self, run: TrainerRun) -> None:
        """Rank 0: the run loses its slot, while its data is still there."""


@dataclass
class Hooks:
    """The hooks of each kind, in the order of registration."""

    validation: list[ConfigValidationHook] = field(default_factory=list)
    discovered: list[DiscoveredHook] = field(default_factory=list)
    forgotten: list[RunHook] = field(default_factory=list)
    creation: list[RunHook] = field(default_factory=list)
    deletion: list[RunHook] = field(default_factory=list)

    def problem_of(self, config: OrchestratorConfig) -> str | None:
        """The reason of the first refusing validation hook, or None. A hook that raises refuses."""
        for hook in self.validation:
            try:
                valid, message = hook(config)
            except Exception as error:
                valid, message = False, f"the check itself failed: {hook_failure(hook, error)}"
            if not valid:
                return message
        return None


class HookError(ValueError):
    """A hook failed: which one, and why."""


def calls_of(
    hooks: Sequence[Callable[..., object]], run_idx: int, run_id: str, *more: object
) -> list[Callable[[], None]]:
    """Calls of `hooks` for one run; what one raises comes out as HookError."""

    def call(hook: Callable[..., object]) -> None:
        try:
            hook(run_idx, run_id, *more)
        except Exception as error:
            raise HookError(hook_failure(hook, error)) from error

    return [partial(call, hook) for hook in hooks]


def call_coming(
    channel: Channel, calls: Sequence[Callable[[], None]], run_id: str, fault: str | None = None
) -> str | None:
    """Make the calls for a run that comes, on all ranks; returns what failed, or None.

    After each call the ranks agree on whether it failed anywhere. Then all of them leave out the rest for this run
    together, so a collective in a later one, or for the next run, still meets its counterparts. `fault` is what failed
    on this rank before. A rank with fewer calls waits for those that have more.
    """
    rest = deque(calls)
    while True:
        if fault is None and rest:
            try:
                rest.popleft()()
            except Exception as error:
                logger.debug("creating %s failed", run_id, exc_info=True)
                fault = error_text(error)
        reports = channel.gather(HookReport(fault, bool(rest)))
        fault = next((report.fault for report in reports if report.fault is not None), None)
        if fault is not None or not any(report.has_more for report in reports):
            return fault


def call_leaving(calls: Sequence[Callable[[], None]], run_id: str) -> None:
    """Make the calls for a run that leaves: one that fails must not keep the others from letting go."""
    for call in calls:
        try:
            call()
        except Exception:
            logger.exception("%s: a part of the trainer failed while the run left its slot", run_id)


def hook_failure(hook: object, error: Exception) -> str:
    """The hook that failed, and why: "Packer.check_room: KeyError: 3"."""
    return f"{getattr(hook, '__qualname__', type(hook).__qualname__)}: {error_text(error)}"


logger = logging.getLogger(__name__)


class MultiRunManager(Slots):
    """The runs of one trainer process, their slots, and the hooks for runs that come and go.

    Args:
        output_dir: where `run_*` folders are looked for.
        max_runs: the number of slots.
        limits: what a run must fit into; without, only the registered layers limit its rank.
        channel: how rank 0 reaches the others; default: over the default process group's store, or none.
        settle_s: how long a config may be half written before it is reported as bad.

    Attributes:
        life: what the trainer does with a run that comes or goes.
        findings: what the last look at the disk found (rank 0).
        waiting: ids of the runs for which there was no slot, in admission order (rank 0).
    """

    def __init__(
        self,
        output_dir: Path,
        max_runs: int,
        *,
        limits: TrainerLimits | None = None,
        channel: Channel | None = None,
        settle_s: float = 0.0,
    ) -> None:
        super().__init__(max_runs)
        self.output_dir = Path(output_dir)
        self.channel = channel or Channel.of_default_group()
        self.life = RunLife()
        self.findings = Findings()
        self.waiting: list[str] = []
        self._adapters = SlotAdapters(max_runs)
        self._weights: SlotWeights = self._adapters
        self._limits = limits
        self._hooks = Hooks(validation=[self._fits])
        self._discovery = Discovery(self.output_dir, self._hooks.problem_of, settle_s)
        self._num_admissions = 0
        self._synced: list[SlotState] = []
        self._evictions = Evictions(self.output_dir)
        # Ids of waiting runs for which others give up their slots.
        self._urgent: set[str] = set()

    @property
    def is_master(self) -> bool:
        """True when this is rank 0."""
        return self.channel.is_master

    # Weights

    @property
    def layers(self) -> dict[str, MultiLoRALinear]:
        """The adapted layers, by their name in the base model."""
        return self._adapters.layers

    @property
    def scaling_factors(self) -> list[float]:
        """By slot, alpha / rank unless a hook sets another value; the layers use this list itself."""
        return self._adapters.scaling

    def register_module(self, name: str, module: MultiLoRALinear) -> None:
        """Called by `MultiLoRALinear.register_with_runs`."""
        self._adapters.register(name, module)

    def register_model(self, weights: SlotWeights) -> None:
        """The runs train this instead of adapters."""
        self._weights = weights

    def rank_of(self, run_idx: int) -> int:
        """The run's own rank, at most that of the layers."""
        return self.run(run_idx).rank

    def dtype_of(self, run_idx: int) -> torch.dtype:
        """The type that the run's weights are rounded to, and published in; in memory all are float32."""
        return self.run(run_idx).dtype

    def alpha_of(self, run_idx: int) -> float:
        """The alpha for the scale that the run is trained with: the config's, unless a hook changed it."""
        run, scale = self.run(run_idx), self.scaling_factors[run_idx]
        # Exactly the config's where its scale was not changed.
        return run.alpha if scale == self._adapters.scale_of(run) else scale * run.rank

    def get_named_parameters_for_run(self, idx: int) -> list[tuple[str, nn.Parameter]]:
        """The adapter's own leaf parameters, at the largest rank, by layer name; or those of the whole model."""
        return self._weights.named_parameters(idx)

    def get_state_dict_for_run(self, idx: int) -> dict[str, Tensor]:
        """The published tensors (PEFT names, own rank and type); copies on the CPU. A collective for a whole model."""
        return self._weights.export(self.run(idx))

    def load_state_dict_for_run(self, idx: int, tensors: dict[str, Tensor]) -> None:
        """Put an adapter of the run's own rank into its slot, or a whole model; ValueError when it does not fit."""
        self._weights.load(self.run(idx), tensors)

    def reset_run_parameters(self, idx: int) -> None:
        """Start values from the run's own seed: neither slot nor neighbours matter. Drops gradients."""
        run = self.run(idx)
        run.generator.manual_seed(run.config.seed)
        self._weights.reset(run)

    # Hooks

    def register_discovered_hook(self, callback: DiscoveredHook) -> None:
        """Rank 0: called when a run gets a slot, before any rank creates it."""
        self._check_master("register_discovered_hook")
        self._hooks.discovered.append(callback)

    def register_forgotten_hook(self, callback: RunHook) -> None:
        """Rank 0: called when a run loses its slot, while its data is still there."""
        self._check_master("register_forgotten_hook")
        self._hooks.forgotten.append(callback)

    def register_config_validation_hook(self, callback: ConfigValidationHook) -> None:
        """Rank 0: may refuse a config. Configs that wait for a slot are judged again, with the new hook."""
        self._check_master("register_config_validation_hook")
        self._hooks.validation.append(callback)
        self._discovery.forget_verdicts()

    def register_creation_hook(self, callback: RunHook) -> None:
        """All ranks, in one order: called for each run that came, after its parameters were reset."""
        self._hooks.creation.append(callback)

    def register_deletion_hook(self, callback: RunHook) -> None:
        """All ranks, in one order: called for each run that left, after its data is gone."""
        self._hooks.deletion.append(callback)

    # Eviction

    def evict_run(self, idx: int, reason: str) -> None:
        """Write the reason down (rank 0). The run leaves its slot at a next `discover_runs` and idles until then."""
        self._check_master("evict_run")
        run = self.run(idx)
        self._evictions.add(run.run_id, reason)
        run.leave(Leaving.AT_ONCE, reason)

    def finish_run(self, run: TrainerRun) -> None:
        """The run reached `max_steps` (rank 0): it leaves its slot at the next `discover_runs`."""
        self._check_master("finish_run")
        run.leave(Leaving.FINISHED, Leaving.FINISHED.value)

    @contextlib.contextmanager
    def run_boundary(self, run: TrainerRun, doing: str) -> Iterator[None]:
        """A failure in here is the run's own fault: it is evicted with the reason, and the others go on (rank 0).

        No collective may be called in here. A run whose folder was deleted meanwhile is not made again.
        """
        try:
            yield
        except Exception as error:
            reason = f"{doing} failed: {error_text(error)}"
            logger.debug("%s", reason, exc_info=True)
            self.evict_run(run.run_idx, reason)

    # Discovery (rank 0)

    @property
    def needs_discovery(self) -> bool:
        """True when a run is to leave its slot, whatever is on disk."""
        are_done = (run.leaving is Leaving.AFTER_BATCH and run.in_work is None for run in self.used)
        return bool(self._evictions.unwritten) or len(self.active) < len(self.used) or any(are_done)

    @property
    def has_changes(self) -> bool:
        """True when `synchronize_state` has runs that came or left to send."""
        admitted = {(run.run_idx, run.admission) for run in self.used}
        return admitted != {(slot.run_idx, slot.admission) for slot in self._synced}

    def discover_runs(self, changed: Collection[Path] | None = None) -> None:
        """Look at the disk, or only at `changed` of `findings.folders`: remove what is gone, then admit (rank 0)."""
        self._check_master("discover_runs")
        # A look that finds nothing still proves that rank 0 is alive.
        self.channel.beat()
        self._evictions.write()
        self.findings = self._discovery.scan({run.run_id: run.inode for run in self.active}, changed)
        self._remove_leaving()
        self._discovery.judge(self.findings)
        for run_id, config in self.findings.changed.items():
            if (run := self.run_of(run_id)) is not None:
                run.take_live_keys(config)
        self._admit_waiting()
        self._discovery.report(self.findings)

    def _fits(self, config: OrchestratorConfig) -> tuple[bool, str]:
        """The first config validation hook."""
        limits = self._limits or self._adapters.limits_for(config)
        problems = "; ".join(str(problem) for problem in check_against_trainer(config, limits))
        return not problems, problems

    def _remove_leaving(self) -> None:
        for run in sorted(self.used, key=lambda run: run.run_id):
            if not run.is_leaving:
                if (found := self.findings.gone.get(run.run_id)) is None:
                    run.leave(Leaving.NO)
                else:
                    run.leave(Leaving.SAVED if found.saves else Leaving.AT_ONCE, found.reason)
            if run.is_leaving and self.life.may_leave(run):
                self._forget(run, run.reason)

    def _admit_waiting(self) -> None:
        """Admit those whose turn it is; of the others, some may take the slots of less urgent runs."""
        taken = self._evictions.unwritten.keys() | self.id_2_idx.keys()
        candidates = [each for each in self.findings.candidates if each.run.run_id not in taken]
        candidates.sort(key=lambda candidate: candidate.run.run_id not in self._urgent)
        waiting = []
        for candidate in candidates:
            if self.unused_idxs:
                self._admit(candidate)
            else:
                waiting.append(candidate.claim)
        self.waiting = [claim.run_id for claim in waiting]
        stay = [run.claim for run in self.used if run.leaving is Leaving.NO]
        pairs = preempted(waiting, stay, len(self.used) - len(stay))
        self._urgent = self._urgent.intersection(self.waiting).union(pairs.values())
        for run_id, by in pairs.items():
            run = self.run(self.id_2_idx[run_id])
            run.leave(Leaving.SAVED, f"preempted by {by}")
            if run.is_leaving and run.note_preempted():
                self.life.may_leave(run)  # to have it saved; it leaves at the next look

    def _forget(self, run: TrainerRun, reason: str) -> None:
        logger.info("%s leaves slot %d: %s", run.run_id, run.run_idx, reason)
        hooks = calls_of(self._hooks.forgotten, run.run_idx, run.run_id)
        call_leaving([partial(self.life.forgotten, run), *hooks], run.run_id)
        self._discovery.suspect(run.run_id)
        self._free(run.run_idx)

    def _admit(self, candidate: Candidate) -> None:
        began_s = self._discovery.spent()
        try:
            effect = read_effect(candidate.run)
            # As JSON, where nan equals itself.
            has_changed = effect.build(candidate.run).model_dump_json() != candidate.config.model_dump_json()
        except ConfigError:
            has_changed = True
        if has_changed:  # since it was judged: it is judged again at the next look
            self._discovery.suspect(candidate.run.run_id, with_config=True)
            return
        config = resolve(candidate.config, self._limits or self._adapters.limits_for(candidate.config))
        self._num_admissions += 1
        run = TrainerRun(min(self.unused_idxs), candidate.run, config, self._num_admissions, candidate.inode)
        run.landed_ns = candidate.landed_ns
        self._take_slot(run)
        try:
            remove_file(run.dir.preempted)
            self.life.admitted(run)
            for call in calls_of(self._hooks.discovered, run.run_idx, run.run_id, config):
                call()
            write_admitted(run.dir, effect, run.progress.step)
        except Exception as error:
            trouble = disk_trouble(error, self.output_dir, run.dir.path)  # then it is tried again at the next look
            if trouble is None:
                self._evictions.add(run.run_id, f"it cannot be admitted: {error_text(error)}")
                self._discovery.charge(run.run_id, began_s)
            self._forget(run, trouble or "it was refused")
            return
        logger.info("%s takes slot %d at step %d", run.run_id, run.run_idx, run.progress.step)

    def _take_slot(self, run: TrainerRun) -> None:
        self.runs[run.run_idx] = run
        self.scaling_factors[run.run_idx] = self._weights.scale_of(run)

    def _free(self, run_idx: int) -> None:
        self.runs[run_idx] = None
        for _, parameter in self._weights.named_parameters(run_idx):
            parameter.grad = None

    # Synchronization (all ranks)

    def synchronize_state(self) -> None:
        """Take over what rank 0 has: the data of all slots, then deletion hooks, then creation hooks."""
        state = self._exchange_state()
        left, came = slot_changes(self._synced, state.slots)
        self._synced = state.slots
        faults = {} if self.is_master else self._catch_up(left, came, state.slots)
        for slot in left:
            call_leaving(calls_of(self._hooks.deletion, slot.run_idx, slot.run_id), slot.run_id)
        for slot in came:
            hooks = calls_of(self._hooks.creation, slot.run_idx, slot.run_id)
            own, began_s = partial(self._create, slot.run_idx), self._discovery.spent()
            fault = call_coming(self.channel, [own, *hooks], slot.run_id, faults.get(slot.run_idx))
            if fault is not None:
                self._drop(slot, fault)
                self._discovery.charge(slot.run_id, began_s)

    def _exchange_state(self) -> StateMessage:
        if self.is_master:
            state = StateMessage([run.state(self.scaling_factors[run.run_idx]) for run in self.used])
            self.channel.send_all(state)
            return state
        message = self.channel.receive()
        assert isinstance(message, StateMessage), f"expected the state of the runs, got {type(message).__name__}"
        return message

    def _catch_up(self, left: list[SlotState], came: list[SlotState], slots: list[SlotState]) -> dict[int, str]:
        """Other ranks: have the same runs and values as rank 0. Returns what failed, by slot."""
        faults = {}
        for slot in left:
            self._free(slot.run_idx)
        for slot in came:
            try:
                config = OrchestratorConfig.model_validate_json(slot.config_json)
                self._take_slot(TrainerRun(slot.run_idx, RunDir(self.output_dir / slot.run_id), config, slot.admission))
            except Exception as error:
                faults[slot.run_idx] = f"its config does not reach rank {self.channel.rank}: {error_text(error)}"
        for slot in slots:
            self.progress[slot.run_idx] = Progress(slot.step, slot.total_tokens, slot.total_samples)
            self.ready_to_update[slot.run_idx] = slot.ready
            self.scaling_factors[slot.run_idx] = slot.scaling
        return faults

    def _create(self, run_idx: int) -> None:
        self.reset_run_parameters(run_idx)
        self.life.created(self.run(run_idx))

    def _drop(self, slot: SlotState, fault: str) -> None:
        """All ranks: release a run that could not be created."""
        self._synced = [other for other in self._synced if other is not slot]
        if self.is_master:
            self._evictions.add(slot.run_id, f"it cannot be started: {fault}")
            self._forget(self.run(slot.run_idx), "it could not be started")
        else:
            self._free(slot.run_idx)
        call_leaving(calls_of(self._hooks.deletion, slot.run_idx, slot.run_id), slot.run_id)

    # Older names.
    check_for_changes = discover_runs
    sync_runs = synchronize_state

    def _check_master(self, what: str) -> None:
        if not self.is_master:
            raise RuntimeError(f"{what} works on rank 0 only, this is rank {self.channel.rank}")


_manager: MultiRunManager | None = None


def setup_multi_run_manager(
    output_dir: Path,
    max_runs: int,
    *,
    limits: TrainerLimits | None = None,
    channel: Channel | None = None,
    settle_s: float = 0.0,
) -> MultiRunManager:
    """Make the manager of this process; a second call replaces it."""
    global _manager
    _manager = MultiRunManager(output_dir, max_runs, limits=limits, channel=channel, settle_s=settle_s)
    return _manager


def get_multi_run_manager() -> MultiRunManager:
    """The manager of this process. Raises RuntimeError before `setup_multi_run_manager`."""
    if _manager is None:
        raise RuntimeError("no MultiRunManager yet: call setup_multi_run_manager first")
    return _manager
