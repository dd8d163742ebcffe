"""Names of loaded adapters and the slots that hold their weights.

A slot is given to another adapter only when its name was unloaded and no request uses it, so a request is
never served weights other than those its name meant when it came. Files are read and checked in the caller's thread;
the model is written to through `run_between_steps` in the engine's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from prime_rl.inference.errors import ApiError
from prime_rl.lora.adapter_state import AdapterConfig, load_peft, load_served_adapter
from prime_rl.lora.linear import AdapterRouting, MultiLoRALinear

RunBetweenSteps = Callable[[Callable[[], None]], "Future[None]"]
# A step of a model that this engine is for takes milliseconds, a long prefill seconds.
APPLY_TIMEOUT_S = 60.0


@dataclass
class _Slot:
    """`name` is None when the slot is free or draining, `num_users` counts jobs that use its weights."""

    name: str | None = None
    path: str = ""
    ready: bool = False
    num_users: int = 0


class AdapterStore:
    """Slots 0 to n-1 of the model's `layers` (none when adapters are switched off). Thread-safe."""

    def __init__(
        self, layers: Mapping[str, MultiLoRALinear], routing: AdapterRouting, run_between_steps: RunBetweenSteps
    ) -> None:
        self._layers = layers
        self._routing = routing
        self._run_between_steps = run_between_steps
        self._lock = threading.Lock()
        self._slots = [_Slot() for _ in routing.scaling] if layers else []

    def loaded(self) -> dict[str, str]:
        """Name to path of the adapters that can be used now."""
        with self._lock:
            return {slot.name: slot.path for slot in self._slots if slot.name is not None and slot.ready}

    def acquire(self, name: str) -> int:
        """The slot of `name`, in use until `release`. Raises ApiError 404."""
        with self._lock:
            for idx, slot in enumerate(self._slots):
                if slot.name == name and slot.ready:
                    slot.num_users += 1
                    return idx
        raise ApiError(404, f"The model {name!r} does not exist.", param="model")

    def release(self, idx: int) -> None:
        with self._lock:
            self._slots[idx].num_users -= 1

    def load(self, name: str, folder: Path) -> None:
        """Read, check and load an adapter. Blocks for a step at most. Raises ApiError 400 with one clear line."""
        idx = self._reserve(name, folder)
        try:
            tensors, config = load_peft(folder)
            self._run_between_steps(lambda: self._apply(idx, tensors, config)).result(APPLY_TIMEOUT_S)
        except (ValueError, OSError) as error:
            self._free(idx)
            raise ApiError(400, f"adapter {name!r} is refused: {error}", param="lora_path") from error
        except BaseException:
            self._free(idx)
            raise
        with self._lock:
            self._slots[idx].ready = True

    def unload(self, name: str) -> None:
        """Forget `name` at once; its slot is free when the last request that uses it has ended. Raises ApiError 404."""
        with self._lock:
            for slot in self._slots:
                if slot.name == name and slot.ready:
                    slot.name, slot.path, slot.ready = None, "", False
                    return
        raise ApiError(404, f"The lora adapter {name!r} cannot be found.", param="lora_name")

    def _reserve(self, name: str, folder: Path) -> int:
        with self._lock:
            if any(slot.name == name for slot in self._slots):
                raise ApiError(400, f"The lora adapter {name!r} has already been loaded.", param="lora_name")
            for idx, slot in enumerate(self._slots):
                if slot.name is None and slot.num_users == 0:
                    slot.name, slot.path = name, str(folder)
                    return idx
            num_draining = sum(slot.name is None for slot in self._slots)
        raise ApiError(400, self._no_room(num_draining), param="lora_name")

    def _no_room(self, num_draining: int) -> str:
        if not self._slots:
            return "This server serves no adapters (model.lora is null)."
        draining = f", {num_draining} of them unloaded but still in use by requests" if num_draining else ""
        return f"All {len(self._slots)} adapter slots are in use{draining}: unload an adapter first."

    def _free(self, idx: int) -> None:
        with self._lock:
            self._slots[idx] = _Slot()

    def _apply(self, idx: int, tensors: Mapping[str, Tensor], config: AdapterConfig) -> None:
        load_served_adapter(self._layers, idx, tensors, config)
        self._routing.scaling[idx] = config.scaling
