"""Three families of reasoning-gym train a pretrained model on two slots, and what is recorded is the library's score.

The scores are computed again from the recorded answers, with the library alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from safetensors.torch import load_file

from prime_rl.contract.samples import Sample, read_samples
from prime_rl.contract.types import read_batch
from tests.system_support import Workspace, closed, make_workspace, read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="not installed: a part of it needs a C compiler"),
]
NUM_STEPS, BATCH_SIZE, NUM_EVAL, NUM_TRAIN, SEED = 5, 8, 2, 20, 7
# Settings of each family, and a question with its answer that shows which form counts.
FAMILIES: dict[str, tuple[dict[str, int], str, str]] = {
    "chain_sum": (
        {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "State the final answer to the following arithmetic problem: 2 + 5 =",
        "7",
    ),
    "letter_counting": (
        {"min_words": 2, "max_words": 3},
        'How many times does the letter "e" appear in the text: "the tree"?',
        "3",
    ),
    "gcd": (
        {"min_value": 2, "max_value": 12},
        "Find the Greatest Common Divisor (GCD) of these numbers: 4, 6. Give only the GCD as your final answer.",
        "2",
    ),
}


@pytest.fixture
def pretrained_workspace(tmp_path: Path, smollm2: Path) -> Iterator[Workspace]:
    workspace = make_workspace(tmp_path, smollm2)
    text = workspace.system_toml.read_text()
    workspace.system_toml.write_text(text.replace("seq_len = 96", "seq_len = 128"))
    yield from closed(workspace)


def write_run(workspace: Workspace, family: str) -> Path:
    settings, question, answer = FAMILIES[family]
    sizes = {"num_examples": NUM_TRAIN, "num_eval_examples": NUM_EVAL}
    env = {
        "id": f"reasoning-gym:{family}",
        "args": {"settings": settings, "instruction": "Answer with the number only.", **sizes},
        "prompt": {"examples": [{"prompt": question, "answer": answer}]},
    }
    run = {
        "batch_size": BATCH_SIZE,
        "rollouts_per_example": 4,
        "max_steps": NUM_STEPS,
        "max_async_level": 1,
        "seed": SEED,
        "model": {"name": str(workspace.model)},
        "optim": {"lr": 2e-4},
        "sampling": {"max_tokens": 6},
        "samples": {"per_step": BATCH_SIZE},
        "env": [env],
        "ckpt": {"interval": 100, "keep_rollouts": True},
    }
    path = workspace.output_dir.parent / f"{family}.toml"
    path.write_text(tomli_w.dumps(run))
    return path


def own_score(dataset: Any, sample: Sample) -> float:
    """That of the family: for what is in the last tag, or without one for the whole answer."""
    number = int(sample.example_id.rpartition("-")[2])
    entry = dataset[number]
    assert entry["question"] in sample.prompt
    answer = sample.completion.removesuffix("<|im_end|>")
    tagged = re.findall(r"<answer>(.*?)</answer>", answer, re.DOTALL)
    return float(dataset.score_answer((tagged[-1] if tagged else answer).strip(), entry))


@pytest.mark.release
def test_three_families_train_and_the_recorded_scores_are_the_librarys_own(pretrained_workspace: Workspace) -> None:
    import reasoning_gym  # it takes a second, and no other test here needs it

    workspace = pretrained_workspace
    workspace.up()
    for family in FAMILIES:
        workspace.prl("runs", "add", str(write_run(workspace, family)), "--id", f"run_{family}")
    for family in FAMILIES:
        workspace.wait(lambda family=family: workspace.state(f"run_{family}") == "finished", f"{family} to finish")
    workspace.prl("down")

    for family, (settings, _, _) in FAMILIES.items():
        run = workspace.run_dir(f"run_{family}")
        dataset = reasoning_gym.create_dataset(family, seed=SEED, size=NUM_EVAL + NUM_TRAIN, **settings)
        samples = read_samples(run.samples, limit=1000)
        assert [sample.step for sample in samples] == [s for s in range(1, NUM_STEPS + 1) for _ in range(BATCH_SIZE)]
        scores = [own_score(dataset, sample) for sample in samples]
        assert [sample.reward for sample in samples] == scores
        batches = [read_batch(run.rollout_file(step)).samples for step in range(1, NUM_STEPS + 1)]
        assert [sample.reward for batch in batches for sample in batch] == scores

        assert len(set(scores)) > 1, "scores that are all alike teach nothing and compare nothing"
        assert max(version for sample in samples for version in sample.policy_versions) >= NUM_STEPS - 2
        updates = read_metrics(run.trainer_metrics)
        assert [line["step"] for line in updates] == list(range(1, NUM_STEPS + 1))
        assert any(line["grad_norm"] > 0 for line in updates)
        adapter = load_file(run.broadcast_dir(NUM_STEPS) / "adapter_model.safetensors")
        assert any(bool(tensor.any()) for name, tensor in adapter.items() if ".lora_B." in name)
