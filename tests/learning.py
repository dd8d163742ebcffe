"""Whether an update went uphill: what is certain about learning, on every machine.

A reward that rises over a few updates is as much luck as learning, and each CPU has its own luck. What is certain is
that an update follows the gradient of the batch that it was made from, and that a small step along it makes answers
with a positive advantage likelier on that very batch. Gradient and log-probabilities are those of transformers and
peft; nothing of the trainer's own code is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from prime_rl.contract.types import TrainingSample

MIN_STANDARD_ERRORS = 5.0


def load_policy(base: Path, adapter: Path | None) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter) if adapter else model


def token_logprobs(model: nn.Module, sample: TrainingSample) -> Tensor:
    """Of tokens 1 to T - 1, after temperature."""
    ids_T = torch.tensor(sample.token_ids)
    logits_TV = model(input_ids=ids_T[None]).logits[0].float() / sample.temperature
    return logits_TV.log_softmax(-1)[:-1].gather(1, ids_T[1:, None])[:, 0]


@torch.no_grad()
def worst_difference(model: nn.Module, sample: TrainingSample) -> float:
    """Of the recorded logprobs of sampled tokens from those of `model`."""
    mask_T = torch.tensor(sample.loss_mask)[1:]
    recorded_T = torch.tensor(sample.logprobs)[1:]
    return float((token_logprobs(model, sample) - recorded_T)[mask_T].abs().max())


@dataclass(frozen=True)
class Ascent:
    """What an update brought on a batch. The objective is the sum of advantage x log-probability over loss tokens."""

    rise: float
    """Of the objective."""
    slope: float
    """Of the objective along the update, where it began: what a step without curvature would bring."""
    noise: float
    """The standard deviation of the slope along updates of the same length in random directions."""

    def check(self) -> None:
        assert self.slope > MIN_STANDARD_ERRORS * self.noise, f"the update does not follow the gradient: {self}"
        assert self.rise > self.slope / 2, f"the objective rises less than its gradient predicts: {self}"


def ascent_of_adapter(base: Path, adapter: Path, samples: Sequence[TrainingSample]) -> Ascent:
    """From the base model, which is the adapter with B = 0, to the adapter."""
    model = load_policy(base, adapter)
    return ascent(model, {name: p.clone() for name, p in model.named_parameters() if ".lora_B." in name}, samples)


def ascent(model: nn.Module, update: Mapping[str, Tensor], samples: Sequence[TrainingSample]) -> Ascent:
    """Of `update`, which led to the weights that `model` has now, on samples drawn before it."""
    moved = {name: model.get_parameter(name) for name in update}
    with torch.no_grad():
        after = sum(float(_objective(model, sample)) for sample in samples)
        for name, parameter in moved.items():
            parameter.sub_(update[name])
    before = 0.0
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in moved.values():
        parameter.requires_grad_()
    for sample in samples:
        objective = _objective(model, sample)
        objective.backward()
        before += float(objective.detach())
    pairs = [(parameter.grad.double(), update[name].double()) for name, parameter in moved.items()]
    slope = sum(float((grad * step).sum()) for grad, step in pairs)
    squares = [sum(float(tensor.square().sum()) for tensor in side) for side in zip(*pairs, strict=True)]
    num_weights = sum(step.numel() for _, step in pairs)
    return Ascent(after - before, slope, math.sqrt(math.prod(squares) / num_weights))


def _objective(model: nn.Module, sample: TrainingSample) -> Tensor:
    return sample.advantage * token_logprobs(model, sample)[torch.tensor(sample.loss_mask)[1:]].sum()
