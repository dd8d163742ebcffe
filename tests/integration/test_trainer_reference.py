"""The whole trainer against a plain loop that shares none of its code: peft, torch's AdamW, the loss written out."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from prime_rl.configs.shared import DEFAULT_TARGET_MODULES
from prime_rl.contract.types import TrainingBatch
from prime_rl.lora.adapter_state import peft_names
from tests.trainer_support import (
    VOCAB,
    adapter,
    make_batch,
    published,
    put_batches,
    relative_difference,
    tiny_model,
    train_until,
    trainer_config,
    write_model,
    write_run,
)

NUM_STEPS, WARMUP, RANK, ALPHA, LR, DECAY, MAX_NORM, DELTA, SEED = 5, 2, 4, 16.0, 3e-3, 0.1, 0.7, 2.0, 11


def plain_loss(model: torch.nn.Module, batch: TrainingBatch) -> Tensor:
    """One sample at a time, no padding: the mean over all loss tokens of -min(r, delta) * A * log pi."""
    terms = []
    for sample in batch.samples:
        logits = model(input_ids=torch.tensor([sample.token_ids])).logits[0]
        logprobs = torch.log_softmax(logits[:-1] / sample.temperature, dim=-1)
        for at in range(1, len(sample.token_ids)):
            if sample.loss_mask[at]:
                log_pi = logprobs[at - 1, sample.token_ids[at]]
                ratio = min(math.exp(log_pi.item() - sample.logprobs[at]), DELTA)
                terms.append(-ratio * sample.advantage * log_pi)
    return torch.stack(terms).mean()


def plain_training() -> tuple[PeftModel, dict[str, Tensor]]:
    model = get_peft_model(
        tiny_model(),
        LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(DEFAULT_TARGET_MODULES), task_type="CAUSAL_LM"),
    )
    named = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(SEED)
    for name, module in tiny_model().named_modules():
        if name.rpartition(".")[2] in DEFAULT_TARGET_MODULES:
            name_A, name_B = peft_names(name)
            start = torch.rand(named[name_A].shape, generator=generator) * 2 - 1
            named[name_A].data.copy_(start / math.sqrt(module.in_features))
            assert not named[name_B].any()
    optimizer = torch.optim.AdamW(named.values(), lr=LR, weight_decay=DECAY)
    for step in range(NUM_STEPS):
        rate = LR * ((step + 1) / (WARMUP + 1) if step < WARMUP else 1 - (step - WARMUP) / (NUM_STEPS - WARMUP))
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        plain_loss(model, make_batch("run_a", step + 1)).backward()
        torch.nn.utils.clip_grad_norm_(named.values(), MAX_NORM)
        optimizer.step()
    return model, {name: parameter.detach() for name, parameter in named.items()}


def test_a_run_reaches_what_a_plain_training_loop_reaches(tmp_path: Path) -> None:
    model, house = write_model(tmp_path / "model"), tmp_path / "house"
    run = write_run(
        house,
        "run_a",
        model,
        max_steps=NUM_STEPS,
        seed=SEED,
        model={"lora": {"rank": RANK, "alpha": ALPHA}},
        optim={"lr": LR, "weight_decay": DECAY, "max_norm": MAX_NORM},
        scheduler={"type": "linear", "warmup_steps": WARMUP},
        loss={"delta": DELTA},
    )
    put_batches(run, NUM_STEPS)
    train_until(trainer_config(house, model, max_tokens_per_micro_batch=96), lambda: published(run) == NUM_STEPS)
    plain_model, plain_adapter = plain_training()
    assert relative_difference(adapter(run, NUM_STEPS), plain_adapter) < 1e-4
    published_model = PeftModel.from_pretrained(tiny_model(), run.broadcast_dir(NUM_STEPS))
    token_ids = torch.randint(0, VOCAB, (2, 10))
    ours, theirs, base = (m(input_ids=token_ids).logits for m in (published_model, plain_model, tiny_model()))
    assert (ours - theirs).abs().max() < 1e-4 and (ours - base).abs().max() > 1e-2
