"""Training state on disk: nothing is lost or changed, and nothing that is read can run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from prime_rl.lora.adapter_state import load_tensors
from prime_rl.trainer.checkpoint import copy_to_cpu, join_tensors, split_tensors

STATE: dict[str, Any] = {
    "type": "adamw",
    "names": ["layer.lora_A", "layer.lora_B"],
    "state": {0: {"step": torch.tensor(3.0), "momentum_buffer": None}, 12: {"exp_avg": torch.randn(2, 3).T}},
    "rate": 0.1 + 0.2,
    "flags": {"done": False, "count": 7},
    "generator": torch.Generator().manual_seed(5).get_state(),
    "half": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    return type(one) is type(other) and bool(one == other)


def through_files(state: Any, folder: Path) -> Any:
    plain, tensors = split_tensors(state)
    save_file(tensors, folder / "state.safetensors")
    return join_tensors(msgspec.json.decode(msgspec.json.encode(plain)), load_tensors(folder / "state.safetensors"))


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    assert equal(STATE, through_files(STATE, tmp_path))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.NAdam])
def test_states_of_torch_optimizers_come_back(tmp_path: Path, kind: Any) -> None:
    parameters = [nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(4))]
    optimizer = kind(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert equal(state, through_files(copy_to_cpu(state), tmp_path))


def test_a_copy_does_not_change_any_more() -> None:
    live = {"state": {0: {"exp_avg": torch.zeros(2)}}, "rates": [torch.ones(1)]}
    taken = copy_to_cpu(live)
    live["state"][0]["exp_avg"].add_(1)  # type: ignore[call-overload]
    live["rates"][0].add_(1)  # type: ignore[index]
    assert taken["state"][0]["exp_avg"].tolist() == [0.0, 0.0] and taken["rates"][0].tolist() == [1.0]


def test_what_cannot_be_saved_and_what_is_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="state/0/hook: a function cannot be saved"):
        split_tensors({"state": {0: {"hook": equal}}})
    with pytest.raises(ValueError, match="tensor 'a/b' not found"):
        join_tensors({"a": {"b": {"$tensor": "a/b"}}}, {})
    (tmp_path / "bad").write_bytes(b"\x80\x04junk")
    with pytest.raises(ValueError, match="bad"):
        load_tensors(tmp_path / "bad")
