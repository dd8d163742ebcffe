"""The trainer's own step on recorded batches, without a workspace full of processes: real slots and optimizers."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import tomli_w
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from prime_rl.configs.base import LoRAConfig
from prime_rl.configs.validate import TrainerLimits
from prime_rl.contract.layout import RunDir
from prime_rl.contract.types import MicroBatch, SampleColumns, TrainingSample
from prime_rl.trainer.fair_queue import RowQueue, rows_of, to_micro_batch
from prime_rl.trainer.model import adapt_model
from prime_rl.trainer.runs import MultiLoRAOptimizer, MultiRunManager
from prime_rl.trainer.runs.sync import ReadyRun
from prime_rl.trainer.step import TrainStep
from prime_rl.trainer.world import World, setup_world

VOCAB, RANK, ALPHA, LR, MAX_NORM = 4096, 8, 16.0, 1e-4, 1.0
# As the trainer has it by default.
MAX_TOKENS = 8192


def bench_model() -> Qwen3ForCausalLM:
    """5.8 M parameters: six layers of width 256; random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def bench_sample(
    rng: random.Random,
    num_tokens: int,
    num_prompt: int | None = None,
    vocab_size: int = VOCAB,
    prompt: Sequence[int] = (),
) -> TrainingSample:
    """By default a quarter of it is prompt; it begins with `prompt`."""
    num_prompt = num_tokens // 4 if num_prompt is None else num_prompt
    mask = [at >= num_prompt for at in range(num_tokens)]
    return TrainingSample(
        token_ids=[*prompt, *(rng.randrange(vocab_size) for _ in mask[len(prompt) :])],
        loss_mask=mask,
        logprobs=[-math.log(vocab_size) * on for on in mask],
        advantage=rng.choice([-1.0, 1.0]),
        reward=0.5,
        temperature=1.0,
        policy_version=0,
        example_id="reverse-text/0",
    )


def bench_text(rng: random.Random, vocab_size: int, least: int = 64, most: int = 512) -> TrainingSample:
    """A conversation to learn, of `least` to `most` tokens: questions and answers in turn, an answer last."""
    num_tokens, mask = rng.randint(least, most), list[bool]()
    while len(mask) < num_tokens:
        mask = [False] * rng.randint(16, 64) + [True] * rng.randint(16, 64) + mask
    return msgspec.structs.replace(
        bench_sample(rng, num_tokens, vocab_size=vocab_size),
        loss_mask=[False, *mask[1 - num_tokens :]],
        logprobs=[0.0] * num_tokens,
        advantage=1.0,
        use="supervised",
    )


@functools.cache
def world(device: Literal["cpu", "cuda"] = "cpu") -> World:
    return setup_world(device, timeout_s=600)


class Tenants:
    """`num_runs` runs in a trainer of `num_slots`.

    Args:
        base: by default the small model.
        again: what backward computes again: none, mlp, layers.
        device: where the base model is.
        packs: lay rows end to end, as the trainer does.
        shares: compute what rows have in common once, as the trainer does.
        max_tokens: positions of a pass.
    """

    def __init__(
        self,
        workspace: Path,
        num_slots: int,
        num_runs: int,
        base: PreTrainedModel | None = None,
        rank: int = RANK,
        again: str = "none",
        *,
        device: Literal["cpu", "cuda"] = "cpu",
        packs: bool = True,
        shares: bool = True,
        max_tokens: int = MAX_TOKENS,
        lr: float = LR,
    ) -> None:
        self._shares, self._max_tokens = shares, max_tokens
        base = bench_model() if base is None else base
        lora, modes = (
            LoRAConfig(rank=rank, alpha=ALPHA),
            {"checkpoints": again == "layers", "lean_mlps": again == "mlp", "packs": packs},
        )
        self.model = model = adapt_model(base, lora, num_slots, **modes)
        limits = TrainerLimits("bench", max_seq_len=2048, max_rank=rank, alpha=ALPHA)
        self.manager = manager = MultiRunManager(workspace, num_slots, limits=limits)
        for name, layer in model.layers.items():
            layer.register_with_runs(manager, name)
        MultiLoRAOptimizer(manager, world(device))
        self.step = TrainStep(model, manager, world(device))
        for number in range(num_runs):
            _write_config(workspace, f"run_{number:03d}", lr)
        manager.discover_runs()
        manager.synchronize_state()
        assert len(manager.used_idxs) == num_runs

    def step_of(self, batches: Sequence[Sequence[SampleColumns]]) -> Callable[[], None]:
        """A call that trains every run on its batch: all passes, then all updates."""

        def step() -> None:
            queue = RowQueue(self._max_tokens, self.model.packs)
            for idx, samples in enumerate(batches):
                rows = rows_of(idx, samples)
                queue.add(idx, rows if self._shares else [replace(row, shared=0) for row in rows])
            while queue:
                self.step.forward_backward(to_micro_batch(queue.next_rows()))
            self._update(batches)

        return step

    def train(self, batches: Sequence[Sequence[SampleColumns]], batch: MicroBatch) -> None:
        """Train every run on its batch, all rows of which are in one pass."""
        self.train_pass(batch)
        self._update(batches)

    def train_pass(self, batch: MicroBatch) -> None:
        """Forward and backward. Raises MemoryError for what does not fit as a whole."""
        self.model.routing.set_rows([None])  # in life the groups of each pass are others: no plan is kept
        if self.step.forward_backward(batch) or math.isfinite(self.step.most_tokens):
            raise MemoryError("the pass does not fit")

    def drop_gradients(self) -> None:
        """Forget what passes have collected."""
        for idx in self.manager.used_idxs:
            self.manager.run(idx).training.weights.drop_gradients()

    def _update(self, batches: Sequence[Sequence[SampleColumns]]) -> None:
        for idx, samples in enumerate(batches):
            run = ReadyRun(idx, sum(len(sample.loss_mask) for sample in samples), len(samples))
            report = self.step.update(self.manager.run(idx), run)
            assert report.problem is None, report.problem


def _write_config(workspace: Path, run_id: str, lr: float) -> None:
    run = RunDir(workspace / run_id)
    run.control.mkdir(parents=True)
    config = {
        "batch_size": 2,
        "rollouts_per_example": 2,
        "max_steps": 1_000_000,
        "model": {"name": "bench"},
        "optim": {"type": "adamw", "lr": lr, "max_norm": MAX_NORM},
        "env": [{"id": "reverse-text"}],
    }
    run.orch_toml.write_text(tomli_w.dumps(config), encoding="utf-8")
