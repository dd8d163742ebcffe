"""Supervised learning from scratch: plain next-token prediction on the assistant's part of demonstrations.

What is left out on purpose: no packing, no mixed precision, no validation split. Same recipe, same machine, same bits.
Shapes: B demonstrations, T tokens of the longest one, L tokens that carry loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from prime_rl.base_model.demonstrations import Demonstration, Demonstrator
from prime_rl.base_model.recipe import Recipe
from prime_rl.base_model.tokenizer import PromptEncoder

IGNORED = -100
# Called after each step with (step, loss). What it raises ends the teaching.
OnStep = Callable[[int, float], None]


def be_reproducible(recipe: Recipe) -> None:
    """Settings of the whole process: sums of floats depend on how threads split them."""
    torch.set_num_threads(recipe.num_threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(recipe.seed)


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """An untaught model. Draws from torch's global generator."""
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        **ends,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    return model


def teach(model: Qwen3ForCausalLM, recipe: Recipe, encoder: PromptEncoder, on_step: OnStep) -> None:
    """Train `model` in place for `recipe.num_steps` steps."""
    demonstrator = Demonstrator(recipe)
    optimizers = _optimizers(model, recipe)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: _lr_ratio(step, recipe)) for each in optimizers]
    num_clean_steps = round(recipe.clean_share * recipe.num_steps)
    model.train()
    for step in range(recipe.num_steps):
        demonstrations = demonstrator.batch(clean=step < num_clean_steps)
        loss = _loss(model, *_tensors(demonstrations, encoder, model.config.pad_token_id))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        on_step(step + 1, loss.item())
    model.eval()


def _optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers (three times fewer steps than AdamW here), AdamW for the rest."""
    named = [(name, p) for name, p in model.named_parameters()]
    inner = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    outer = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(inner, lr=recipe.muon_lr, weight_decay=0.0),
        torch.optim.AdamW(outer, lr=recipe.adamw_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _lr_ratio(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then linearly down."""
    up = (step + 1) / max(1, recipe.warmup_steps)
    return min(1.0, up) * max(recipe.min_lr_ratio, 1.0 - step / recipe.num_steps)


def _tensors(demonstrations: list[Demonstration], encoder: PromptEncoder, pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels `[B, T]`, padded at the right; a label is the next token, and only in an answer."""
    pairs = [(encoder.prompt(each.prompt), encoder.answer(each.answer)) for each in demonstrations]
    shape = len(pairs), max(len(prompt) + len(answer) for prompt, answer in pairs)
    token_ids_BT, labels_BT = torch.full(shape, pad_id), torch.full(shape, IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        token_ids_BT[row, :end] = torch.tensor(prompt + answer)
        labels_BT[row, len(prompt) - 1 : end - 1] = torch.tensor(answer)
    return token_ids_BT, labels_BT


def _loss(model: Qwen3ForCausalLM, token_ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
    """Mean cross-entropy over answer tokens. Padding is at the right and attention causal, so no mask is needed."""
    hidden_BTD = model.model(input_ids=token_ids_BT, use_cache=False).last_hidden_state
    answer_BT = labels_BT != IGNORED
    logits_LV = model.lm_head(hidden_BTD[answer_BT])
    loss = nn.functional.cross_entropy(logits_LV, labels_BT[answer_BT])
    assert math.isfinite(loss.item()), "the loss is not finite"
    return loss
