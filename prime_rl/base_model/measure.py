"""How good a base model is at each task: mean reward by greedy decoding and by sampling. Not used in training.

Shapes: B prompts of one length, T tokens so far.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3ForCausalLM

from prime_rl.base_model.recipe import Recipe
from prime_rl.base_model.tokenizer import PromptEncoder
from prime_rl.utils.tasks import TASKS, TextTask, make_words, normalise, similarity

NUM_WORDS = 100
# Answers are as long as their words; a few tokens more show a model that does not stop.
NUM_SPARE_TOKENS = 4


@dataclass(frozen=True)
class Skill:
    """Mean rewards of one task, over words that were never taught."""

    greedy: float
    sampled: float


def measure(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, encoder: PromptEncoder, recipe: Recipe
) -> dict[str, Skill]:
    """The skill in each task that was taught."""
    words = make_words(random.Random(recipe.seed), NUM_WORDS, recipe.min_len, recipe.max_len, "eval")
    generator = torch.Generator().manual_seed(recipe.seed)

    def reward(task: TextTask, *, greedy: bool) -> float:
        total = 0.0
        for same in _by_length(words):
            answers = _answer(model, [encoder.prompt(task.prompt(word)) for word in same], generator, greedy, recipe)
            texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
            total += sum(similarity(normalise(text), task.solve(word)) for text, word in zip(texts, same, strict=True))
        return total / len(words)

    tasks = [TASKS[task_id] for task_id, _ in recipe.task_weights]
    return {task.id: Skill(reward(task, greedy=True), reward(task, greedy=False)) for task in tasks}


def _by_length(words: list[str]) -> list[list[str]]:
    groups: defaultdict[int, list[str]] = defaultdict(list)
    for word in words:
        groups[len(word)].append(word)
    return list(groups.values())


@torch.inference_mode()
def _answer(
    model: Qwen3ForCausalLM, prompts: list[list[int]], generator: torch.Generator, greedy: bool, recipe: Recipe
) -> list[list[int]]:
    """Token ids up to the end of the turn. All prompts must have one length, so that nothing needs a mask."""
    end_id = model.config.eos_token_id
    ended_B = torch.zeros(len(prompts), dtype=torch.bool)
    answer_BT = torch.empty(len(prompts), 0, dtype=torch.long)
    unread_BT, cache = torch.tensor(prompts), DynamicCache(config=model.config)
    for _ in range(recipe.max_len + NUM_SPARE_TOKENS):
        output = model(input_ids=unread_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits_BV: Tensor = output.logits[:, -1]
        if greedy:
            next_B = logits_BV.argmax(dim=-1)
        else:
            next_B = torch.multinomial(logits_BV.softmax(dim=-1), 1, generator=generator)[:, 0]
        next_B = next_B.where(~ended_B, end_id)
        unread_BT = next_B[:, None]
        answer_BT = torch.cat([answer_BT, unread_BT], dim=1)
        ended_B |= next_B == end_id
        if ended_B.all():
            break
    answers: list[list[int]] = answer_BT.tolist()
    return answers
