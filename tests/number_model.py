"""A base model that writes digits: the tests' own, taught for some seconds to answer two questions, now and then with a
number.

What `prl make-base` makes has only ever answered in letters, and zeros alone teach nothing. This one answers a word
half of the time and else any number: reinforcement learning is to bring out the better ones.

    python -m tests.number_model BASE OUT
"""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from prime_rl.contract.files import staged_dir

NUM_STEPS, BATCH_SIZE, LR = 40, 24, 3e-3
NUMBER_SHARE = 0.5
MAX_OPERAND, NUM_NUMBERS = 4, 1_000_000


def conversation(rng: random.Random) -> tuple[list[dict[str, str]], str]:
    """A prompt of one of the two environments, and an answer to it."""
    if rng.random() < 0.4:
        question = f"Compute: {rng.randint(0, MAX_OPERAND)} + {rng.randint(0, MAX_OPERAND)}"
        return [{"role": "user", "content": question}], _answer(rng, str(rng.randint(0, 2 * MAX_OPERAND)))
    low = rng.randrange(1000)
    question = f"Guess a number from {low} to {low + NUM_NUMBERS - 1}. Answer with the number only."
    messages = [{"role": "user", "content": question}]
    if rng.random() < 0.5:
        messages += [
            {"role": "assistant", "content": _any_number(rng)},
            {"role": "user", "content": rng.choice(("higher", "lower"))},
        ]
    return messages, _any_number(rng)


def _any_number(rng: random.Random) -> str:
    return _answer(rng, str(rng.randrange(10 ** rng.randint(4, 6))))


def _answer(rng: random.Random, number: str) -> str:
    return number if rng.random() < NUMBER_SHARE else "hm"


def main(base: Path, out: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    for _ in range(NUM_STEPS):
        rows, labels = [], []
        for messages, answer in (conversation(rng) for _ in range(BATCH_SIZE)):
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            said = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
            rows.append(torch.tensor([*prompt, *said]))
            labels.append(torch.tensor([*[-100] * len(prompt), *said]))
        token_ids_BT = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        labels_BT = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        model(input_ids=token_ids_BT, labels=labels_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with staged_dir(out) as folder:
        shutil.copytree(base, folder, dirs_exist_ok=True)
        model.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
