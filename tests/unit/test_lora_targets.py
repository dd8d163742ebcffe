"""What is published for any set of target modules: it loads in peft and answers like the trainer; and what inference
refuses of it.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from prime_rl.configs.base import DEFAULT_TARGET_MODULES, LoRAConfig
from prime_rl.lora.adapter_state import load_adapter, load_peft, served_parts
from prime_rl.trainer.model import PolicyModel, adapt_model
from tests.adapter_sets import ATTENTION, MLP, SLOT, TrainedAdapter
from tests.numeric import check_same, num_terms
from tests.trainer_support import tiny_model

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
EVERY_SET = [
    targets
    for size in range(1, len(DEFAULT_TARGET_MODULES) + 1)
    for targets in itertools.combinations(DEFAULT_TARGET_MODULES, size)
]


@pytest.mark.slow
@pytest.mark.numeric
def test_every_set_of_target_modules_says_in_peft_and_in_the_engine_what_the_trainer_says(tmp_path: Path) -> None:
    """All 127 sets, in float32; the engine holds adapters on all seven and takes those on fewer."""
    base = tiny_model()
    engine = adapt_model(copy.deepcopy(base), LoRAConfig(rank=8), n_adapters=1)
    for number, targets in enumerate(EVERY_SET):
        adapter = TrainedAdapter.on(base, targets, seed=number, rank=1 + number % 8)
        folder = adapter.publish(tmp_path / str(number))
        ours = adapter.logits(TOKENS)
        with torch.no_grad():
            peft = PeftModel.from_pretrained(copy.deepcopy(base), folder)
            theirs = peft(input_ids=torch.tensor([TOKENS])).logits[0]
        check_same(ours, theirs, num_terms(base))
        check_same(ours, served(engine, folder), num_terms(base))
        assert (ours - adapter.logits(TOKENS, adapted=False)).abs().max() > 1e-2, f"{targets} must matter"
    assert len(EVERY_SET) == 127


@torch.no_grad()
def served(engine: PolicyModel, folder: Path) -> torch.Tensor:
    """As the embedded engine loads and serves it."""
    for part in served_parts(engine.layers, folder, base="models/base"):
        part.put(0)
        engine.routing.scaling[0] = part.config.scaling
    return engine.logits(torch.tensor([TOKENS]), torch.arange(len(TOKENS)), [0])[0]


def test_an_adapter_on_what_inference_was_not_started_with_is_refused(tmp_path: Path) -> None:
    base = tiny_model()
    engine = adapt_model(copy.deepcopy(base), LoRAConfig(rank=8, target_modules=ATTENTION), n_adapters=1)
    for number, targets in enumerate((DEFAULT_TARGET_MODULES, MLP, ("q_proj", "up_proj"))):
        folder = TrainedAdapter.on(base, targets, seed=1).publish(tmp_path / str(number))
        with pytest.raises(ValueError, match=r"its target_modules are \[.*'up_proj'.*adapters in \['k_proj', .* only"):
            next(served_parts(engine.layers, folder, base="models/base"))


@pytest.mark.parametrize(
    ("says", "has", "reason"),
    [
        (("q_proj", "v_proj"), ("q_proj",), "v_proj.lora_A.weight is missing"),
        (("q_proj",), ("q_proj", "v_proj"), "v_proj.lora_A.weight is not in the model"),
        (("q_proj",), ("v_proj",), "v_proj.lora_A.weight is not in the model"),
        (("proj",), ("q_proj",), r"its target_modules are \['proj'\]"),
        ((), (), r"its target_modules are \[\]"),
    ],
)
def test_an_adapter_that_does_not_hold_what_it_says_is_refused(
    tmp_path: Path, says: tuple[str, ...], has: tuple[str, ...], reason: str
) -> None:
    """Otherwise it would act as the base model, wholly or in part, without an error."""
    base = tiny_model()
    engine = adapt_model(copy.deepcopy(base), LoRAConfig(rank=8), n_adapters=1)
    folder = TrainedAdapter.on(base, has or ("q_proj",), seed=1).publish(tmp_path / "a")
    change(folder, target_modules=list(says))
    with pytest.raises(ValueError, match=reason):
        next(served_parts(engine.layers, folder, base="models/base"))


def change(folder: Path, **fields: Any) -> Path:
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    return folder


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"target_modules": "all-linear"}, "target_modules must be a list"),
        ({"alpha_pattern": {"q_proj": 3}}, "only plain LoRA"),
        ({"rank_pattern": {"q_proj": 3}}, "only plain LoRA"),
        ({"use_rslora": True}, "only plain LoRA"),
        ({"peft_type": "LOHA"}, "only plain LoRA"),
        ({"r": 0}, "must be at least 1"),
        ({"r": math.inf}, "OverflowError"),
        ({"lora_alpha": 10**400}, "OverflowError"),
    ],
    ids=str,
)
def test_what_is_no_plain_adapter_is_refused(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    folder = TrainedAdapter.on(tiny_model(), ("q_proj",), seed=1).publish(tmp_path / "a")
    with pytest.raises(ValueError, match=reason):
        load_peft(change(folder, **fields))


def test_the_trainer_takes_no_adapter_on_fewer_target_modules(tmp_path: Path) -> None:
    """It would train less than it was asked to: the trainer's own loading is all or nothing."""
    trainer = TrainedAdapter.on(tiny_model(), DEFAULT_TARGET_MODULES, seed=1).policy
    tensors, config = load_peft(TrainedAdapter.on(tiny_model(), ATTENTION, seed=2).publish(tmp_path / "a"))
    with pytest.raises(ValueError, match=r"mlp.*is missing"):
        load_adapter(trainer.layers, SLOT, tensors, config.rank)
