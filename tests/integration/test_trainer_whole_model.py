"""`model.lora` unset: one run fine-tunes the whole model, with the same loop, files and promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from prime_rl.configs.base import ConfigError, build
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.contract.layout import RunDir, list_steps
from prime_rl.contract.types import TrainingSample
from tests.integration.test_trainer_reference import aipo, loss_token_logprobs
from tests.trainer_support import (
    VOCAB,
    check_refused,
    make_batch,
    published,
    put_batch,
    put_batches,
    relative_difference,
    tiny_model,
    train_until,
    whole_config,
    write_model,
    write_run,
)

NUM_STEPS, LR, DECAY, MAX_NORM = 4, 3e-3, 0.1, 0.7
SETTINGS: dict[str, Any] = {
    "loss": {"delta": 2.0},
    "max_steps": NUM_STEPS,
    "optim": {"lr": LR, "weight_decay": DECAY, "max_norm": MAX_NORM},
    "ckpt": {"interval": 3},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model"))
    (folder / "tokenizer.json").write_text('{"a": "tokenizer"}')
    return folder


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    """A loop that shares none of the trainer's code: torch's AdamW, the loss written out, one sample at a time."""
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        batch = make_batch("run_a", step + 1).samples
        losses = [aipo(loss_token_logprobs(model, one), log_mu(one), torch.empty(0), one.advantage) for one in batch]
        torch.cat(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def log_mu(sample: TrainingSample) -> Tensor:
    return torch.tensor([p for p, on in zip(sample.logprobs, sample.loss_mask, strict=True) if on])


def weights(run: RunDir, step: int) -> dict[str, Tensor]:
    return load_file(run.broadcast_dir(step) / "model.safetensors")


def test_a_run_reaches_what_a_plain_loop_reaches_and_publishes_a_model(
    plain: dict[str, Tensor], model: Path, tmp_path: Path
) -> None:
    run = write_run(tmp_path, "run_a", model, **SETTINGS)
    put_batches(run, NUM_STEPS)
    train_until(whole_config(tmp_path, model), lambda: published(run) == NUM_STEPS)
    assert relative_difference(weights(run, NUM_STEPS), plain) <= 1e-4
    assert relative_difference(weights(run, NUM_STEPS - 1), plain) > 1e-3
    folder = run.broadcast_dir(NUM_STEPS)
    assert (folder / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight, "what was tied stays tied"
    reference = tiny_model()
    reference.load_state_dict(plain, strict=False)
    token_ids = torch.randint(0, VOCAB, (2, 10))
    ours, theirs, base = (m(input_ids=token_ids).logits for m in (loaded, reference, tiny_model()))
    assert (ours - base).abs().max() > 1e-2
    assert (ours - theirs).norm() < 1e-3 * (ours - base).norm()


@pytest.mark.numeric
def test_a_run_goes_on_from_its_checkpoint_to_the_same_bits(model: Path, tmp_path: Path) -> None:
    """Stopped after every step."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    runs = [write_run(workspace, "run_a", model, **SETTINGS) for workspace in (straight, broken)]
    put_batches(runs[0], NUM_STEPS)
    train_until(whole_config(straight, model), lambda: published(runs[0]) == NUM_STEPS)
    for step in range(1, NUM_STEPS + 1):
        put_batch(runs[1], make_batch("run_a", step))
        train_until(whole_config(broken, model), lambda step=step: published(runs[1]) == step)
    assert list_steps(runs[1].checkpoints, stable_only=True)[-1] == NUM_STEPS
    ours, theirs = weights(runs[1], NUM_STEPS), weights(runs[0], NUM_STEPS)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_next_run_starts_from_the_base_model_and_a_lost_version_is_published_again(
    model: Path, tmp_path: Path
) -> None:
    """The first leaves the slot in the middle; the second reaches what it would have reached alone."""
    first = write_run(tmp_path / "both", "run_first", model, optim={"lr": 0.1})
    put_batches(first, 2)
    second = RunDir(tmp_path / "both" / "run_a")

    def done() -> bool:
        if published(first) == 2 and not first.evicted.exists():
            first.evicted.write_text("enough")
            put_batches(write_run(tmp_path / "both", "run_a", model, **SETTINGS), 2)
        return published(second) == 2

    train_until(whole_config(tmp_path / "both", model), done)
    alone = write_run(tmp_path / "alone", "run_a", model, **SETTINGS)
    put_batches(alone, 2)
    train_until(whole_config(tmp_path / "alone", model), lambda: published(alone) == 2)
    assert relative_difference(weights(second, 2), weights(alone, 2)) <= 1e-6
    (alone.broadcast_dir(2) / "STABLE").unlink()
    train_until(whole_config(tmp_path / "alone", model), lambda: published(alone) == 2)
    assert relative_difference(weights(alone, 2), weights(second, 2)) <= 1e-6


def test_weights_that_blow_up_evict_the_run_and_the_next_one_trains(model: Path, tmp_path: Path) -> None:
    wild = write_run(tmp_path, "run_0", model, optim={"lr": 1e30, "max_norm": 1e9})
    put_batches(wild, 3)
    run = write_run(tmp_path, "run_a", model, **SETTINGS)
    put_batches(run, 1)
    train_until(whole_config(tmp_path, model), lambda: wild.evicted.exists() and published(run) == 1)
    assert "not finite" in wild.evicted.read_text()
    assert all(bool(tensor.isfinite().all()) for tensor in weights(run, 1).values())


def test_bfloat16_computes_and_publishes_in_it_and_keeps_small_updates(model: Path, tmp_path: Path) -> None:
    """Steps of 1e-5 would all be rounded away in bfloat16: what is trained is kept in float32."""
    run = write_run(tmp_path, "run_a", model, max_steps=9, optim={"lr": 1e-5, "max_norm": 1e9})
    put_batches(run, 2)
    train_until(whole_config(tmp_path, model, model={"dtype": "bfloat16"}), lambda: published(run) == 2)
    assert {tensor.dtype for tensor in weights(run, 2).values()} == {torch.bfloat16}
    masters = load_file(run.trainer_checkpoint(2) / "model.safetensors")
    moved = [(masters[name] - tensor.detach()).abs().max() for name, tensor in tiny_model().named_parameters()]
    assert all(0 < float(by) < 3e-5 for by in moved)
    assert AutoModelForCausalLM.from_pretrained(run.broadcast_dir(2)).dtype == torch.bfloat16


def test_what_needs_adapters_is_refused(model: Path, tmp_path: Path) -> None:
    refused: dict[str, dict[str, Any]] = {
        "model.lora.rank: this workspace fine-tunes the whole model": {"model": {"lora": {"rank": 4}}},
        "optim.type: found 'muon'": {"optim": {"type": "muon"}},
        "loss.kl_coef: found 0.1": {"loss": {"kl_coef": 0.1}},
    }
    runs = [write_run(tmp_path, f"run_{at}", model, **changes) for at, changes in enumerate(refused.values())]
    train_until(whole_config(tmp_path, model), lambda: all(run.config_error.exists() for run in runs))
    for run, words in zip(runs, refused, strict=True):
        assert words in run.config_error.read_text()


def test_more_slots_than_one_need_adapters(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"max_concurrent_runs = 4: must be 1 without \[model\.lora\] .* set it to 1, or add"
    ):
        build(TrainerConfig, {"model": {"name": "x"}}, "trainer.toml")
    check_refused(["--output_dir", str(tmp_path), "--max_concurrent_runs", "2"], 2, "model.lora")
