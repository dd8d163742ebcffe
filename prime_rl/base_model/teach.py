"""Supervised learning from scratch: plain next-token prediction on the assistant's part of demonstrations.

What is left out on purpose: no packing, no mixed precision, no validation split. Same recipe, same machine, same bits.
The tokenizer has one token a byte, because nothing has to be learnt and any text comes back unchanged. How good the
model became is measured by greedy decoding and by sampling, and not used in training.

Shapes: B demonstrations (or prompts of one length), T tokens of the longest one (or so far), L tokens that carry loss.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from prime_rl.utils.tasks import CONSONANTS, TASKS, VOWELS, TextTask, make_train_word, make_words, normalise, similarity

if TYPE_CHECKING:
    from prime_rl.base_model.__main__ import Recipe

PAD = "<|pad|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (PAD, TURN_START, TURN_END)

# Every tag strips the white space around it and line ends are written out, so that the template means the same
# whatever a renderer's `trim_blocks` and `lstrip_blocks` are.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant' + '\\n' -}}
{%- endif -%}
"""


def build_tokenizer(max_positions: int) -> PreTrainedTokenizerFast:
    """The tokenizer of a model with room for `max_positions` tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *letters))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=PAD,
        extra_special_tokens=[TURN_START],
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


class PromptEncoder:
    """Token ids of one-turn prompts, without rendering the template for each of thousands."""

    _STAND_IN = "@"

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        message = {"role": "user", "content": self._STAND_IN}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        before, after = text.split(self._STAND_IN)
        self._tokenizer = tokenizer
        self._before, self._after = self._ids(before), self._ids(after)
        self._end = self._ids(TURN_END)

    def prompt(self, content: str) -> list[int]:
        """A user turn, ready for the assistant's."""
        return self._before + self._ids(content) + self._after

    def answer(self, content: str) -> list[int]:
        """The assistant's message, with the token that ends its turn."""
        return self._ids(content) + self._end

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


# Of the letters of a careless answer, these parts are mistaken and lost.
MISTAKEN_SHARE = 0.15
LOST_SHARE = 0.07


@dataclass(frozen=True)
class Demonstration:
    """A prompt, and the answer that the model is taught to give to it."""

    prompt: str
    answer: str


class Demonstrator:
    """An endless stream of demonstrations from one seed. No word of the eval split is ever shown."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._rng = random.Random(recipe.seed)
        self._tasks = [TASKS[task_id] for task_id, _ in recipe.task_weights]
        self._weights = [weight for _, weight in recipe.task_weights]

    def batch(self, *, clean: bool) -> list[Demonstration]:
        """The next `batch_size` demonstrations: all right when `clean`, else of mixed quality."""
        return [self._next(clean) for _ in range(self._recipe.batch_size)]

    def _next(self, clean: bool) -> Demonstration:
        task = self._rng.choices(self._tasks, self._weights)[0]
        word = make_train_word(self._rng, self._recipe.min_len, self._recipe.max_len)
        return Demonstration(task.prompt(word), task.solve(word) if clean else self._mixed(task, word))

    def _mixed(self, task: TextTask, word: str) -> str:
        kind = self._rng.random()
        if kind < self._recipe.other_task_share:
            return self._rng.choice(self._tasks).solve(word)
        answer = task.solve(word)
        return self._careless(answer) if kind < self._recipe.other_task_share + self._recipe.careless_share else answer

    def _careless(self, answer: str) -> str:
        letters = []
        for letter in answer:
            luck = self._rng.random()
            if luck < MISTAKEN_SHARE:
                letters.append(self._rng.choice(CONSONANTS + VOWELS))
            elif luck >= MISTAKEN_SHARE + LOST_SHARE:
                letters.append(letter)
        return "".join(letters) or answer


IGNORED = -100
# Called after each step with its number, from 1. What it raises ends the teaching.
OnStep = Callable[[int], None]


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
        on_step(step + 1)
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
    groups: defaultdict[int, list[str]] = defaultdict(list)
    for word in words:
        groups[len(word)].append(word)
    generator = torch.Generator().manual_seed(recipe.seed)

    def reward(task: TextTask, *, greedy: bool) -> float:
        total = 0.0
        for same in groups.values():
            answers = _answer(model, [encoder.prompt(task.prompt(word)) for word in same], generator, greedy, recipe)
            texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
            total += sum(similarity(normalise(text), task.solve(word)) for text, word in zip(texts, same, strict=True))
        return total / len(words)

    tasks = [TASKS[task_id] for task_id, _ in recipe.task_weights]
    return {task.id: Skill(reward(task, greedy=True), reward(task, greedy=False)) for task in tasks}


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
