"""The environments with numbers end to end: a real workspace, conversations of two turns, and updates that learn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.contract.types import TrainingSample, read_batch
from tests.learning import ascent_of_adapter
from tests.number_model import MAX_OPERAND, NUM_NUMBERS
from tests.system_support import Workspace, closed, make_workspace

pytestmark = [pytest.mark.release, pytest.mark.numeric]
# As many versions as the trainer keeps.
NUM_STEPS, MAX_TURNS = 3, 2
RUN = """\
batch_size = 48
rollouts_per_example = 16
max_steps = {num_steps}
max_async_level = 1
[model]
name = "{model}"
[optim]
lr = 0.0015
[sampling]
max_tokens = 8
[[env]]
id = "{env}"
args = {args}
[ckpt]
interval = 100
keep_rollouts = true
"""
ARGS = {
    "guess-number": f'{{ wording = "short", num_numbers = {NUM_NUMBERS}, max_turns = {MAX_TURNS} }}',
    "arithmetic": f'{{ wording = "short", max_operand = {MAX_OPERAND}, operations = ["+"], num_examples = 12, '
    "num_eval_examples = 1 }",
}


@pytest.fixture
def numbers_workspace(tmp_path: Path, number_model: Path) -> Iterator[Workspace]:
    """A workspace with a slot for each of the two, and a base model that can say numbers."""
    workspace = make_workspace(tmp_path, number_model)
    text = workspace.system_toml.read_text()
    workspace.system_toml.write_text(text.replace("seq_len = 96", "seq_len = 192"))
    yield from closed(workspace)


def turns_of(sample: TrainingSample) -> list[int]:
    """Lengths of the stretches of tokens that are trained on."""
    return [len(list(group)) for is_ours, group in itertools.groupby(sample.loss_mask) if is_ours]


@pytest.mark.release
def test_sums_and_guesses_over_two_turns_are_learned_from(numbers_workspace: Workspace) -> None:
    workspace = numbers_workspace
    workspace.up()
    for env, args in ARGS.items():
        path = workspace.output_dir.parent / f"{env}.toml"
        path.write_text(RUN.format(num_steps=NUM_STEPS, model=workspace.model, env=env, args=args))
        workspace.prl("runs", "add", str(path), "--id", f"run_{env}")
    for env in ARGS:
        workspace.wait(lambda env=env: workspace.state(f"run_{env}") == "finished", f"{env} to finish")
    workspace.prl("down")

    for env in ARGS:
        run = workspace.run_dir(f"run_{env}")
        batches = {step: read_batch(run.rollout_file(step)).samples for step in range(1, NUM_STEPS + 1)}
        for step, samples in batches.items():
            for sample in samples:
                check_sample(sample, step, MAX_TURNS if env == "guess-number" else 1)
        # Equal rewards say nothing, and the adapter stays as it is: what is compared with the base is the first batch
        # that says something.
        step = next(step for step, samples in batches.items() if any(sample.advantage for sample in samples))
        ascent_of_adapter(workspace.model, run.broadcast_dir(step), batches[step]).check()


def check_sample(sample: TrainingSample, step: int, num_turns: int) -> None:
    """Versions and logprobs of its turns."""
    turns = turns_of(sample)
    assert len(turns) == len(sample.turn_versions) == num_turns
    assert min(sample.turn_versions) == sample.policy_version >= max(0, step - 2)
    assert max(sample.turn_versions) <= step - 1 and max(turns) <= 8
    assert all(ours or not logprob for ours, logprob in zip(sample.loss_mask, sample.logprobs, strict=True))
