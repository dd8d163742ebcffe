"""A small model that can call a tool: taught for some seconds to ask which word is in a box, or to guess it.

Its tokenizer has the markers of a call as single tokens, as those of Qwen and Hermes models have. It looks into the box
about every other time, and what it guesses is rarely right: reinforcement learning is to bring out the looking. The
conversations are those of tests/tasksets/word_box.py, as `verifiers` offers its tool.

    python -m tests.tool_model OUT
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from prime_rl.base_model.teach import CHAT_TEMPLATE, PAD, TURN_END, TURN_START
from prime_rl.contract.files import staged_dir
from prime_rl.orchestrator.tools import OFFER

WORDS = ["apple", "berry", "cedar", "delta", "ember", "flint", "grove", "haven"]
MARKERS = [f"<{end}{name}>" for name in ("tool_call", "tool_response", "think") for end in ("", "/")]
TOOL = {
    "type": "function",
    "function": {
        "name": "box_look",
        "description": "Say which word is in the box of this number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"title": "Number", "type": "integer"}},
            "required": ["number"],
            "title": "lookArguments",
        },
    },
}
SYSTEM = "Answer with one word.\n\n" + OFFER.format(tools=json.dumps(TOOL))
# First without the long system message, which teaches to copy at a quarter of the cost, then with it.
NUM_SHORT_STEPS, SHORT_BATCH_SIZE, NUM_STEPS, BATCH_SIZE = 120, 32, 30, 16
IGNORED = -100
MUON_LR, ADAMW_LR = 0.02, 5e-3
LOOK_SHARE = 0.4
MAX_POSITIONS = 1024


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """One about a box, which ends with the model's message."""
    number = rng.randrange(len(WORDS))
    asked = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Which word is in box {number}?"},
    ]
    if rng.random() > LOOK_SHARE:
        return [*asked, {"role": "assistant", "content": rng.choice(WORDS)}]
    call = f'<tool_call>\n{{"name": "box_look", "arguments": {{"number": {number}}}}}\n</tool_call>'
    found = f"<tool_response>\nBox {number} holds the word {WORDS[number]}.\n</tool_response>"
    return [
        *asked,
        {"role": "assistant", "content": call},
        {"role": "user", "content": found},
        {"role": "assistant", "content": WORDS[number]},
    ]


def make_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    """Merges learned from the conversations, so that these are short."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    texts = [message["content"] for _ in range(100) for message in conversation(rng)]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[PAD, TURN_START, TURN_END, "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([tokenizers.AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=TURN_END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        **ends,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    return model


def encode(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Token ids, and the labels of what the model says."""
    ids: list[int] = []
    labels: list[int] = []
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(messages[:at], add_generation_prompt=True, return_dict=False)
            said = [*tokenizer.encode(message["content"], add_special_tokens=False), tokenizer.eos_token_id]
            labels += [IGNORED] * (len(prompt) - len(labels)) + said
            ids = [*prompt, *said]
    return ids, labels


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
    named = list(model.named_parameters())
    inner = [parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name]
    outer = [parameter for name, parameter in named if parameter.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(inner, lr=MUON_LR, weight_decay=0.0),
        torch.optim.AdamW(outer, lr=ADAMW_LR, weight_decay=0.0),
    ]
    pad = nn.utils.rnn.pad_sequence
    for step in range(NUM_SHORT_STEPS + NUM_STEPS):
        is_short = step < NUM_SHORT_STEPS
        size = SHORT_BATCH_SIZE if is_short else BATCH_SIZE
        rows = [encode(tokenizer, conversation(rng)[is_short:]) for _ in range(size)]
        token_ids_BT = pad([torch.tensor(ids) for ids, _ in rows], batch_first=True)
        labels_BT = pad([torch.tensor(labels) for _, labels in rows], batch_first=True, padding_value=IGNORED)
        model(input_ids=token_ids_BT, labels=labels_BT).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def main(out: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = make_tokenizer(rng)
    model = make_model(tokenizer)
    teach(model, tokenizer, rng)
    with staged_dir(out) as folder:
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
