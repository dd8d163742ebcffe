"""MultiRunManager: the runs of one trainer process, their slots, and who is told when they come and go.

Rank 0 looks at the disk (`discover_runs`); all ranks then take over what it found (`synchronize_state`), all deletions
before all creations. What belongs to one run may fail: the run is evicted with the reason written down and the others
go on. The manager holds no optimizer and reads no batches; those parts register hooks. It knows the adapters only
through the layers that registered themselves.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.validate import TrainerLimits, check_against_trainer, resolve
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import RunDir
from prime_rl.lora.adapter_state import export_adapter, load_adapter, reset_adapter
from prime_rl.lora.linear import MultiLoRALinear
from prime_rl.trainer.runs.discovery import Candidate, Discovery, Findings
from prime_rl.trainer.runs.hooks import (
    ConfigValidationHook,
    DiscoveredHook,
    Hooks,
    RunHook,
    call_leaving,
    in_words,
    printable,
)
from prime_rl.trainer.runs.slots import Progress, Slots
from prime_rl.trainer.runs.sync import Channel, SlotState, StateMessage, slot_changes

logger = logging.getLogger(__name__)

# A reason may quote what a run wrote; people read one line.
MAX_REASON_CHARS = 2_000


@dataclass(frozen=True)
class _Admitted:
    """What rank 0 remembers of a run in a slot."""

    admission: int
    inode: int


class MultiRunManager:
    """See the module. Per-slot lists have `max_runs` entries; those of a free slot mean nothing.

    Attributes:
        progress, config, scaling_factors, ready_to_update: by slot. A config is resolved: it has rank, alpha, seq_len.
        generators: by slot, the run's own random numbers, a part of its checkpoints.
        layers: the adapted layers, by their name in the base model.
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
    ) -> None:
        self.output_dir = output_dir
        self.max_runs = max_runs
        self.limits = limits or TrainerLimits.of(TrainerConfig())
        self.channel = channel or Channel()
        self.progress = [Progress() for _ in range(max_runs)]
        self.ready_to_update = [False] * max_runs
        self.scaling_factors = [1.0] * max_runs
        self.config: dict[int, OrchestratorConfig] = {}
        self.generators: dict[int, torch.Generator] = {}
        self.layers: dict[str, MultiLoRALinear] = {}
        self.findings = Findings()
        self.waiting: list[str] = []
        self._slots = Slots(max_runs)
        self._hooks = Hooks()
        self._admitted: dict[int, _Admitted] = {}
        self._num_admissions = 0
        self._synced: list[SlotState] = []
        self._leaving: dict[int, str] = {}
        self._unwritten: dict[str, str] = {}
        self._discovery = Discovery(output_dir, self._hooks.problem_of)
        self.register_config_validation_hook(self._fits_this_trainer)

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

    def get_run_dir(self, run_idx: int) -> Path:
        return self.run_dir(run_idx).path

    def run_dir(self, run_idx: int) -> RunDir:
        """The paths of the run in slot `run_idx`; its id and its folder were checked when it was admitted."""
        return RunDir(self.output_dir / self._slots.idx_2_id[run_idx])

    def inode_of(self, run_idx: int) -> int:
        """The folder of the run as it was admitted: another folder of the same name is another run (rank 0)."""
        return self._admitted[run_idx].inode

    def run_dirs(self) -> list[Path]:
        return [self.get_run_dir(idx) for idx in sorted(self.used_idxs)]

    # Adapters

    def register_module(self, name: str, module: MultiLoRALinear) -> None:
        """Called by `MultiLoRALinear.register_with_runs`."""
        self.layers[name] = module

    def rank_of(self, run_idx: int) -> int:
        rank = self.config[run_idx].model.lora.rank
        assert rank is not None, "the config in a slot is resolved"
        return rank

    def dtype_of(self, run_idx: int) -> torch.dtype:
        """What the run's weights are rounded to, and published in; in memory all are float32."""
        return torch.bfloat16 if self.config[run_idx].model.lora.dtype == "bfloat16" else torch.float32

    def get_named_parameters_for_run(self, run_idx: int) -> list[tuple[str, nn.Parameter]]:
        """The adapter's own leaf parameters, at the largest rank, by layer name."""
        named = []
        for name, layer in self.layers.items():
            lora_A, lora_B = layer.parameters_of(run_idx)
            named += [(f"{name}.lora_A", lora_A), (f"{name}.lora_B", lora_B)]
        return named

    def get_state_dict_for_run(self, run_idx: int) -> dict[str, Tensor]:
        """The adapter under PEFT names, at the run's own rank and type; copies on the CPU."""
        tensors, dtype = export_adapter(self.layers, run_idx, self.rank_of(run_idx)), self.dtype_of(run_idx)
        return {name: tensor.to(dtype) for name, tensor in tensors.items()}

    def load_state_dict_for_run(self, run_idx: int, tensors: dict[str, Tensor]) -> None:
        """Put an adapter of the run's own rank into its slot; ValueError when it does not fit."""
        dtype = self.dtype_of(run_idx)
        rounded = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        load_adapter(self.layers, run_idx, rounded, self.rank_of(run_idx))

    def reset_run_parameters(self, run_idx: int) -> None:
        """Start values from the run's own seed: neither slot nor neighbours matter. Drops gradients."""
        generator = self.generators[run_idx] = torch.Generator().manual_seed(self.config[run_idx].seed)
        reset_adapter(self.layers, run_idx, generator, self.rank_of(run_idx), self.dtype_of(run_idx))

    # Hooks

    def register_discovered_hook(self, hook: DiscoveredHook) -> None:
        self._hooks.discovered.append(hook)

    def register_forgotten_hook(self, hook: RunHook) -> None:
        self._hooks.forgotten.append(hook)

    def register_creation_hook(self, hook: RunHook) -> None:
        self._hooks.creation.append(hook)

    def register_deletion_hook(self, hook: RunHook) -> None:
        self._hooks.deletion.append(hook)

    def register_config_validation_hook(self, hook: ConfigValidationHook) -> None:
        self._hooks.validation.append(hook)

    # Eviction

    def evict_run(self, run_idx: int, reason: str) -> None:
        """Write the reason down (rank 0). The run leaves its slot at the next `discover_runs` and idles until then."""
        self._check_master("evict_run")
        self._leaving[run_idx] = reason
        self._evict(self._slots.idx_2_id[run_idx], reason)

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
            reason = f"{doing} failed: {in_words(error)}"
            logger.debug("%s", reason, exc_info=True)
            self.evict_run(run_idx, reason)

    def _evict(self, run_id: str, reason: str) -> None:
        self._unwritten[run_id] = printable(" ".join(reason.split()))[:MAX_REASON_CHARS]
        logger.warning("evicting %s: %s", run_id, self._unwritten[run_id])
        self._write_evictions()

    def _write_evictions(self) -> None:
        """A reason that cannot be written (disk full) still counts here, and is tried again at every look."""
        for run_id, reason in list(self._unwritten.items()):
            run = RunDir(self.output_dir / run_id)
            try:
                if run.path.is_dir():
                    write_atomic(run.evicted, reason + "\n")
            except OSError as error:
                logger.error("%s: the reason of its eviction cannot be written: %s", run_id, error)
                continue
            del self._unwritten[run_id]

    # Discovery (rank 0)

    @property
    def needs_discovery(self) -> bool:
        """Whether a run is to leave its slot, whatever the disk says."""
        return bool(self._leaving or self._unwritten)

    @property
    def has_changes(self) -> bool:
        """Whether `synchronize_state` has something to tell."""
        admitted = {(idx, seen.admission) for idx, seen in self._admitted.items()}
        return admitted != {(slot.run_idx, slot.admission) for slot in self._synced}

    def discover_runs(self) -> None:
        """Look at the disk: remove what is gone, evicted or finished, then admit what waits (rank 0)."""
        self._check_master("discover_runs")
        self._write_evictions()
        ids = self._slots.idx_2_id
        leaving = {ids[idx]: reason for idx, reason in self._leaving.items()}
        staying = {ids[idx]: seen.inode for idx, seen in self._admitted.items() if idx not in self._leaving}
        self.findings = self._discovery.scan(staying)
        for run_id, reason in sorted({**self.findings.gone, **leaving}.items()):
            self._forget(self._slots.id_2_idx[run_id], run_id, reason)
        self.waiting = []
        for candidate in self.findings.candidates:
            if candidate.run.run_id in self._unwritten:
                continue
            if self.unused_idxs:
                self._admit(candidate)
            else:
                self.waiting.append(candidate.run.run_id)

    def _forget(self, run_idx: int, run_id: str, reason: str) -> None:
        logger.info("%s leaves slot %d: %s", run_id, run_idx, reason)
        call_leaving(self._hooks.forgotten, run_idx, run_id)
        self._admitted.pop(run_idx)
        self._delete_run_data(run_idx)

    def _admit(self, candidate: Candidate) -> None:
        run_id, config = candidate.run.run_id, resolve(candidate.config, self.limits)
        run_idx = self._slots.take(run_id)
        self._num_admissions += 1
        self._admitted[run_idx] = _Admitted(self._num_admissions, candidate.inode)
        self._create_run_data(run_idx, config)
        try:
            for hook in self._hooks.discovered:
                hook(run_idx, run_id, config)
        except Exception as error:
            self._evict(run_id, f"it cannot be admitted: {in_words(error)}")
            self._forget(run_idx, run_id, "a hook refused it")
            return
        logger.info("%s takes slot %d at step %d", run_id, run_idx, self.progress[run_idx].step)

    def _fits_this_trainer(self, config: OrchestratorConfig) -> tuple[bool, str]:
        problems = check_against_trainer(config, self.limits)
        return not problems, "; ".join(str(problem) for problem in problems)

    # Synchronization (all ranks)

    def synchronize_state(self) -> None:
        """Take over what rank 0 discovered: deletion hooks, then creation hooks, then agree on which runs failed."""
        if self.is_master:
            state = self._state()
            self.channel.send_all(state)
        else:
            message = self.channel.receive()
            assert isinstance(message, StateMessage), f"expected the state of the runs, got {type(message).__name__}"
            state = message
        left, came = slot_changes(self._synced, state.slots)
        for slot in left:
            if not self.is_master:
                self._delete_run_data(slot.run_idx)
            call_leaving(self._hooks.deletion, slot.run_idx, slot.run_id)
        failures = {slot.run_idx: reason for slot in came if (reason := self._create(slot)) is not None}
        self._synced = state.slots
        self._drop_failed(came, self.channel.gather(failures))

    def _state(self) -> StateMessage:
        return StateMessage(
            [
                SlotState(
                    idx,
                    self._slots.idx_2_id[idx],
                    self._admitted[idx].admission,
                    self.config[idx].model_dump_json(),
                    self.progress[idx].step,
                )
                for idx in sorted(self._admitted)
            ]
        )

    def _create(self, slot: SlotState) -> str | None:
        """Make a run on this rank; returns why it failed."""
        try:
            if not self.is_master:
                self._slots.take(slot.run_id, slot.run_idx)
                self._create_run_data(slot.run_idx, OrchestratorConfig.model_validate_json(slot.config_json))
                self.progress[slot.run_idx].step = slot.step
            self.reset_run_parameters(slot.run_idx)
            for hook in self._hooks.creation:
                hook(slot.run_idx, slot.run_id)
        except Exception as error:
            logger.debug("creating %s failed", slot.run_id, exc_info=True)
            return in_words(error)
        return None

    def _drop_failed(self, came: list[SlotState], failures_by_rank: list[dict[int, str]]) -> None:
        """A run that failed on any rank is dropped by all."""
        failures = {idx: reason for failures in reversed(failures_by_rank) for idx, reason in failures.items()}
        for slot in came:
            if slot.run_idx not in failures:
                continue
            call_leaving(self._hooks.deletion, slot.run_idx, slot.run_id)
            if self.is_master:
                self._evict(slot.run_id, f"it cannot be started: {failures[slot.run_idx]}")
                self._forget(slot.run_idx, slot.run_id, "a hook failed")
            else:
                self._delete_run_data(slot.run_idx)
        self._synced = [slot for slot in self._synced if slot.run_idx not in failures]

    def _create_run_data(self, run_idx: int, config: OrchestratorConfig) -> None:
        lora = config.model.lora
        assert lora.rank is not None and lora.alpha is not None, "the config is resolved"
        self.config[run_idx] = config
        self.progress[run_idx] = Progress()
        self.ready_to_update[run_idx] = False
        self.scaling_factors[run_idx] = lora.alpha / lora.rank

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
            raise RuntimeError(f"{what} is for rank 0 alone, this is rank {self.channel.rank}")
