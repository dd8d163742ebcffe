"""MultiRunManager: the runs of one trainer process, their slots, and the hooks for runs that come and go.

Rank 0 looks at the disk (`discover_runs`); all ranks then take over what it found (`synchronize_state`). The hooks of
one look are called in this order:

    rank 0      forgotten (every run that leaves), config validation (every config that is new), discovered
    all ranks   deletion (every run that left), creation (every run that came)

each kind in the order of registration. What belongs to one run may fail: the run is evicted with the reason written
down and the others go on.

The manager holds no optimizer and reads no batches; those parts register hooks. It reaches adapters only through layers
that registered themselves, and a whole model, where that is trained, as their stand-in.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.validate import TrainerLimits
from prime_rl.contract.layout import RunDir
from prime_rl.lora.linear import MultiLoRALinear
from prime_rl.trainer.runs.adapters import SlotAdapters, SlotWeights, dtype_of, rank_of
from prime_rl.trainer.runs.admission import AdmissionRules
from prime_rl.trainer.runs.discovery import Candidate, Discovery, Findings
from prime_rl.trainer.runs.evictions import Evictions
from prime_rl.trainer.runs.hooks import (
    ConfigValidationHook,
    DiscoveredHook,
    Hooks,
    RunHook,
    call_coming,
    call_leaving,
    error_text,
    hook_failure,
)
from prime_rl.trainer.runs.slots import Progress, Slots
from prime_rl.trainer.runs.sync import Channel, SlotState, StateMessage, slot_changes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Admitted:  # what rank 0 remembers of a run in a slot
    admission: int
    inode: int


class MultiRunManager:
    """See the module. Per-slot lists have `max_runs` entries; those of a free slot mean nothing.

    Args:
        output_dir: where `run_*` folders are looked for.
        max_runs: slots.
        limits: what a run must fit into; without, only the registered layers limit its rank.
        channel: how rank 0 reaches the others; default: over the default process group's store, or none.
        settle_s: how long a config may be half written before it is reported as bad.

    Attributes:
        progress, config, scaling_factors, ready_to_update: by slot. A config is resolved: it has rank, alpha, seq_len.
            What rank 0 sets before `synchronize_state` reaches all ranks with it.
        generators: by slot, the run's own random numbers, a part of its checkpoints.
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
        self.output_dir = Path(output_dir)
        self.max_runs = max_runs
        self.channel = channel or Channel.of_default_group()
        self.progress = [Progress() for _ in range(max_runs)]
        self.ready_to_update = [False] * max_runs
        self.config: dict[int, OrchestratorConfig] = {}
        self.generators: dict[int, torch.Generator] = {}
        self.findings = Findings()
        self.waiting: list[str] = []
        self._adapters = SlotAdapters(max_runs)
        self._weights: SlotWeights = self._adapters
        self._rules = AdmissionRules(limits, self._adapters)
        self._slots = Slots(max_runs)
        self._hooks = Hooks(validation=[self._rules.check])
        self._discovery = Discovery(self.output_dir, self._hooks.problem_of, settle_s)
        self._admitted: dict[int, _Admitted] = {}
        self._num_admissions = 0
        self._synced: list[SlotState] = []
        self._leaving: dict[int, str] = {}
        self._evictions = Evictions(self.output_dir)

    # Slots

    @property
    def is_master(self) -> bool:
        return self.channel.is_master

    @property
    def idx_2_id(self) -> dict[int, str]:
        return dict(self._slots.idx_2_id)

    @property
    def id_2_idx(self) -> dict[str, int]:
        return dict(self._slots.id_2_idx)

    @property
    def used_idxs(self) -> set[int]:
        return self._slots.used_idxs

    @property
    def unused_idxs(self) -> set[int]:
        return self._slots.unused_idxs

    @property
    def active_idxs(self) -> list[int]:
        """Slots whose run goes on: neither evicted nor finished, only not yet removed. Ascending."""
        return [idx for idx in sorted(self.used_idxs) if idx not in self._leaving]

    @property
    def ready_to_update_idxs(self) -> list[int]:
        return [idx for idx in sorted(self.used_idxs) if self.ready_to_update[idx]]

    def get_run_dir(self, idx: int) -> Path:
        return self.run_dir(idx).path

    def run_dir(self, run_idx: int) -> RunDir:
        """The paths of the run in slot `run_idx`; its id and its folder were checked when it was admitted."""
        return RunDir(self.output_dir / self._slots.run_in(run_idx))

    def inode_of(self, run_idx: int) -> int:
        """The folder of the run as it was admitted: another folder of the same name is another run (rank 0)."""
        return self._admitted[run_idx].inode

    def run_dirs(self) -> list[Path]:
        return [self.get_run_dir(idx) for idx in sorted(self.used_idxs)]

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
        return rank_of(self._config_of(run_idx).model.lora)

    def dtype_of(self, run_idx: int) -> torch.dtype:
        """What the run's weights are rounded to, and published in; in memory all are float32."""
        return dtype_of(self._config_of(run_idx).model.lora)

    def alpha_of(self, run_idx: int) -> float:
        """The alpha for the scale that the run is trained with: the config's, unless a hook changed it."""
        return self._adapters.alpha_of(run_idx, self._config_of(run_idx).model.lora)

    def get_named_parameters_for_run(self, idx: int) -> list[tuple[str, nn.Parameter]]:
        """The adapter's own leaf parameters, at the largest rank, by layer name; or those of the whole model."""
        return self._weights.named_parameters(idx)

    def get_state_dict_for_run(self, idx: int) -> dict[str, Tensor]:
        """What is published (PEFT names, own rank and type); copies on the CPU. A collective for a whole model."""
        return self._weights.export(idx, self._config_of(idx).model.lora)

    def load_state_dict_for_run(self, idx: int, tensors: dict[str, Tensor]) -> None:
        """Put an adapter of the run's own rank into its slot, or a whole model; ValueError when it does not fit."""
        self._weights.load(idx, tensors, self._config_of(idx).model.lora)

    def reset_run_parameters(self, idx: int) -> None:
        """Start values from the run's own seed: neither slot nor neighbours matter. Drops gradients."""
        config = self._config_of(idx)
        generator = self.generators[idx] = torch.Generator().manual_seed(config.seed)
        self._weights.reset(idx, generator, config.model.lora)

    def _config_of(self, run_idx: int) -> OrchestratorConfig:
        self._slots.run_in(run_idx)
        return self.config[run_idx]

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
        """Write the reason down (rank 0). The run leaves its slot at the next `discover_runs` and idles until then."""
        self._check_master("evict_run")
        self._evictions.add(self._slots.run_in(idx), reason)
        self._leaving[idx] = reason

    def finish_run(self, run_idx: int) -> None:
        """The run reached `max_steps` (rank 0): it leaves its slot at the next `discover_runs`."""
        self._check_master("finish_run")
        self._leaving[run_idx] = "it reached max_steps"

    @contextlib.contextmanager
    def run_boundary(self, run_idx: int, doing: str) -> Iterator[None]:
        """What fails in here is the run's own fault: it is evicted with the reason, and the others go on (rank 0).

        No collective may be called in here. A run whose folder was deleted meanwhile is not made again.
        """
        try:
            yield
        except Exception as error:
            reason = f"{doing} failed: {error_text(error)}"
            logger.debug("%s", reason, exc_info=True)
            self.evict_run(run_idx, reason)

    # Discovery (rank 0)

    @property
    def needs_discovery(self) -> bool:
        """Whether a run is to leave its slot, whatever is on disk."""
        return bool(self._leaving or self._evictions)

    @property
    def has_changes(self) -> bool:
        """Whether `synchronize_state` has runs that came or left to send."""
        admitted = {(idx, seen.admission) for idx, seen in self._admitted.items()}
        return admitted != {(slot.run_idx, slot.admission) for slot in self._synced}

    def discover_runs(self, changed: Collection[Path] | None = None) -> None:
        """Look at the disk, or only at `changed` of `findings.folders`: remove what is gone, then admit (rank 0)."""
        self._check_master("discover_runs")
        # A look that finds nothing still proves that rank 0 is alive.
        self.channel.beat()
        self._evictions.write()
        ids = self._slots.idx_2_id
        leaving = {ids[idx]: reason for idx, reason in self._leaving.items()}
        staying = {ids[idx]: seen.inode for idx, seen in self._admitted.items() if idx not in self._leaving}
        self.findings = self._discovery.scan(staying, changed)
        for run_id, reason in sorted({**self.findings.gone, **leaving}.items()):
            self._forget(self._slots.id_2_idx[run_id], run_id, reason)
        self._discovery.judge(self.findings)
        self.waiting = []
        for candidate in [each for each in self.findings.candidates if each.run.run_id not in self._evictions]:
            if self.unused_idxs:
                self._admit(candidate)
            else:
                self.waiting.append(candidate.run.run_id)
        self._discovery.report(self.findings)

    def _forget(self, run_idx: int, run_id: str, reason: str) -> None:
        logger.info("%s leaves slot %d: %s", run_id, run_idx, reason)
        call_leaving(self._hooks.forgotten, run_idx, run_id)
        self._admitted.pop(run_idx)
        self._discovery.suspect(run_id)
        self._delete_run_data(run_idx)

    def _admit(self, candidate: Candidate) -> None:
        run_id, config = candidate.run.run_id, self._rules.resolve(candidate.config)
        run_idx = self._slots.take(run_id)
        self._num_admissions += 1
        self._admitted[run_idx] = _Admitted(self._num_admissions, candidate.inode)
        self._create_run_data(run_idx, config)
        for hook in self._hooks.discovered:
            try:
                hook(run_idx, run_id, config)
            except Exception as error:
                self._evictions.add(run_id, f"it cannot be admitted: {hook_failure(hook, error)}")
                self._forget(run_idx, run_id, "a hook refused it")
                return
        logger.info("%s takes slot %d at step %d", run_id, run_idx, self.progress[run_idx].step)

    # Synchronization (all ranks)

    def synchronize_state(self) -> None:
        """Take over what rank 0 has: the data of all slots, then deletion hooks, then creation hooks."""
        state = self._exchange_state()
        left, came = slot_changes(self._synced, state.slots)
        self._synced = state.slots
        faults = {} if self.is_master else self._catch_up(left, came, state.slots)
        for slot in left:
            call_leaving(self._hooks.deletion, slot.run_idx, slot.run_id)
        for slot in came:
            hooks = [self._reset, *self._hooks.creation]
            fault = call_coming(self.channel, hooks, slot.run_idx, slot.run_id, faults.get(slot.run_idx))
            if fault is not None:
                self._drop(slot, fault)

    def _exchange_state(self) -> StateMessage:
        if self.is_master:
            state = StateMessage([self._state_of(idx) for idx in sorted(self._admitted)])
            self.channel.send_all(state)
            return state
        message = self.channel.receive()
        assert isinstance(message, StateMessage), f"expected the state of the runs, got {type(message).__name__}"
        return message

    def _state_of(self, run_idx: int) -> SlotState:
        progress = self.progress[run_idx]
        return SlotState(
            run_idx,
            self._slots.idx_2_id[run_idx],
            self._admitted[run_idx].admission,
            self.config[run_idx].model_dump_json(exclude_unset=True),
            progress.step,
            progress.total_tokens,
            progress.total_samples,
            self.ready_to_update[run_idx],
            self.scaling_factors[run_idx],
        )

    def _catch_up(self, left: list[SlotState], came: list[SlotState], slots: list[SlotState]) -> dict[int, str]:
        """Other ranks: have the same runs and values as rank 0. Returns what failed, by slot."""
        faults = {}
        for slot in left:
            self._delete_run_data(slot.run_idx)
        for slot in came:
            self._slots.take(slot.run_id, slot.run_idx)
            try:
                self._create_run_data(slot.run_idx, OrchestratorConfig.model_validate_json(slot.config_json))
            except Exception as error:
                faults[slot.run_idx] = f"its config does not reach rank {self.channel.rank}: {error_text(error)}"
        for slot in slots:
            self.progress[slot.run_idx] = Progress(slot.step, slot.total_tokens, slot.total_samples)
            self.ready_to_update[slot.run_idx] = slot.ready
            self.scaling_factors[slot.run_idx] = slot.scaling
        return faults

    def _reset(self, run_idx: int, run_id: str) -> None:
        self.reset_run_parameters(run_idx)

    def _drop(self, slot: SlotState, fault: str) -> None:
        """All ranks: release a run that could not be created."""
        self._synced = [other for other in self._synced if other is not slot]
        if self.is_master:
            self._evictions.add(slot.run_id, f"it cannot be started: {fault}")
            self._forget(slot.run_idx, slot.run_id, "a hook failed")
        else:
            self._delete_run_data(slot.run_idx)
        call_leaving(self._hooks.deletion, slot.run_idx, slot.run_id)

    def _create_run_data(self, run_idx: int, config: OrchestratorConfig) -> None:
        self.config[run_idx] = config
        self.progress[run_idx] = Progress()
        self.ready_to_update[run_idx] = False
        self.scaling_factors[run_idx] = self._weights.scale_of(config.model.lora)

    def _delete_run_data(self, run_idx: int) -> None:
        self._slots.release(run_idx)
        self.config.pop(run_idx, None)
        self.generators.pop(run_idx, None)
        self._leaving.pop(run_idx, None)
        self.ready_to_update[run_idx] = False

    # Names of an older version of this interface.
    check_for_changes = discover_runs
    sync_runs = synchronize_state

    def _check_master(self, what: str) -> None:
        if not self.is_master:
            raise RuntimeError(f"{what} works on rank 0 only, this is rank {self.channel.rank}")
