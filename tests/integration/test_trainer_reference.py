"""The whole trainer against a plain loop that shares none of its code: peft, torch's AdamW, the loss written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from prime_rl.configs.base import DEFAULT_TARGET_MODULES
from prime_rl.contract.layout import RunDir
from prime_rl.contract.types import TrainingBatch, TrainingSample
from prime_rl.lora.adapter_state import peft_names
from tests.metrics_support import documented
from tests.trainer_support import (
    VOCAB,
    adapter,
    make_batch,
    published,
    put_batch,
    relative_difference,
    tiny_model,
    train_until,
    trainer_config,
    with_soft,
    write_model,
    write_run,
)

pytestmark = pytest.mark.numeric

NUM_STEPS, WARMUP, RANK, ALPHA, LR, DECAY, MAX_NORM, DELTA, SEED = 5, 2, 4, 16.0, 3e-3, 0.1, 0.7, 2.0, 11


# Log pi of the loss tokens of a sample, log mu, log-probabilities of the base, A -> the loss of each token.
SampleLoss = Callable[[Tensor, Tensor, Tensor, float], Tensor]
# The losses of tokens by sample -> the loss of the batch.
Mean = Callable[[list[Tensor]], Tensor]


def token_mean(losses: list[Tensor]) -> Tensor:
    return torch.cat(losses).mean()


def aipo(log_pi: Tensor, log_mu: Tensor, log_base: Tensor, advantage: float) -> Tensor:
    ratios = [min(math.exp(p - m), DELTA) for p, m in zip(log_pi.tolist(), log_mu.tolist(), strict=True)]
    return -torch.tensor(ratios) * advantage * log_pi


def aipo_near_the_base(log_pi: Tensor, log_mu: Tensor, log_base: Tensor, advantage: float) -> Tensor:
    log_q = log_base - log_pi
    return aipo(log_pi, log_mu, log_base, advantage) + 2.0 * (log_q.exp() - 1 - log_q)


def gspo(log_pi: Tensor, log_mu: Tensor, log_base: Tensor, advantage: float) -> Tensor:
    s = (log_pi - log_mu).mean().exp()
    return -torch.minimum(s * advantage, s.clip(1 - 0.3, 1 + 0.5) * advantage).expand(len(log_pi))


def dr_grpo(log_pi: Tensor, log_mu: Tensor, log_base: Tensor, advantage: float) -> Tensor:
    """Around the trainer's own logprobs, so nothing is clipped; with a truncated weight."""
    weight = (log_pi.detach() - log_mu).exp().clip(max=1.1)
    return -weight * advantage * (log_pi - log_pi.detach()).exp()


LOSSES: dict[str, tuple[dict[str, Any], SampleLoss, Mean]] = {
    "run_aipo": ({"delta": DELTA}, aipo, token_mean),
    "run_kl": ({"delta": DELTA, "kl_coef": 2.0}, aipo_near_the_base, token_mean),
    "run_gspo": (
        {"type": "gspo", "clip_low": 0.3, "clip_high": 0.5, "old_logprobs": "inference"},
        gspo,
        lambda losses: torch.stack([loss.mean() for loss in losses]).mean(),
    ),
    # 16 is sampling.max_tokens of the run.
    "run_dr_grpo": (
        {"type": "dr_grpo", "weight_cap": 1.1},
        dr_grpo,
        lambda losses: torch.cat(losses).sum() / (len(losses) * 16),
    ),
}


def batch_of(run_id: str, step: int) -> TrainingBatch:
    """A recorded batch, sampled at several temperatures."""
    batch = make_batch(run_id, step)
    samples = [replace(sample, temperature=(1.0, 0.7, 1.3)[i % 3]) for i, sample in enumerate(batch.samples)]
    return replace(batch, samples=samples)


def loss_token_logprobs(model: torch.nn.Module, sample: TrainingSample) -> Tensor:
    """One sample at a time, no padding."""
    logits = model(input_ids=torch.tensor([sample.token_ids])).logits[0]
    logprobs = torch.log_softmax(logits[:-1] / sample.temperature, dim=-1)
    places = [at for at in range(1, len(sample.token_ids)) if sample.loss_mask[at]]
    return torch.stack([logprobs[at - 1, sample.token_ids[at]] for at in places])


def plain_loss(
    model: PeftModel,
    batch: TrainingBatch,
    sample_loss: SampleLoss,
    mean: Mean,
    logprobs_of: Callable[[torch.nn.Module, TrainingSample], Tensor] = loss_token_logprobs,
) -> Tensor:
    losses = []
    for sample in batch.samples:
        log_mu = torch.tensor([p for p, on in zip(sample.logprobs, sample.loss_mask, strict=True) if on])
        with model.disable_adapter(), torch.no_grad():
            log_base = logprobs_of(model, sample)
        losses.append(sample_loss(logprobs_of(model, sample), log_mu, log_base, sample.advantage))
    return mean(losses)


def plain_training(
    sample_loss: SampleLoss = aipo,
    mean: Mean = token_mean,
    batches: Callable[[str, int], TrainingBatch] = batch_of,
    num_steps: int = NUM_STEPS,
    on_step: Callable[[PeftModel, float], None] = lambda model, loss: None,
    logprobs_of: Callable[[torch.nn.Module, TrainingSample], Tensor] = loss_token_logprobs,
) -> tuple[PeftModel, dict[str, Tensor]]:
    """`on_step` gets the model before each update, and the loss."""
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
    for step in range(num_steps):
        rate = LR * ((step + 1) / (WARMUP + 1) if step < WARMUP else 1 - (step - WARMUP) / (num_steps - WARMUP))
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = plain_loss(model, batches("run_a", step + 1), sample_loss, mean, logprobs_of)
        on_step(model, loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(named.values(), MAX_NORM)
        optimizer.step()
    return model, {name: parameter.detach() for name, parameter in named.items()}


def run_with_loss(workspace: Path, run_id: str, model: Path, loss: dict[str, Any]) -> RunDir:
    run = write_run(
        workspace,
        run_id,
        model,
        max_steps=NUM_STEPS,
        seed=SEED,
        model={"lora": {"rank": RANK, "alpha": ALPHA}},
        optim={"lr": LR, "weight_decay": DECAY, "max_norm": MAX_NORM},
        scheduler={"type": "linear", "warmup_steps": WARMUP},
        loss=loss,
    )
    for step in range(1, NUM_STEPS + 1):
        put_batch(run, batch_of(run_id, step))
    return run


def test_a_run_reaches_what_a_plain_training_loop_reaches(tmp_path: Path) -> None:
    model, workspace = write_model(tmp_path / "model"), tmp_path / "workspace"
    run = run_with_loss(workspace, "run_a", model, {"delta": DELTA})
    train_until(trainer_config(workspace, model, max_tokens_per_micro_batch=96), lambda: published(run) == NUM_STEPS)
    plain_model, plain_adapter = plain_training()
    assert relative_difference(adapter(run, NUM_STEPS), plain_adapter) < 1e-4
    published_model = PeftModel.from_pretrained(tiny_model(), run.broadcast_dir(NUM_STEPS))
    token_ids = torch.randint(0, VOCAB, (2, 10))
    ours, theirs, base = (m(input_ids=token_ids).logits for m in (published_model, plain_model, tiny_model()))
    assert (ours - base).abs().max() > 1e-2
    assert (ours - theirs).norm() < 1e-3 * (ours - base).norm()


NUM_SFT_STEPS = 20


def cross_entropy(log_pi: Tensor, log_mu: Tensor, log_base: Tensor, advantage: float) -> Tensor:
    return -log_pi


def texts_of(run_id: str, step: int) -> TrainingBatch:
    """The same texts every fourth time, so that they are learned."""
    batch = make_batch(run_id, 1 + step % 4)
    samples = [
        replace(
            sample, use="supervised", advantage=1.0, logprobs=[0.0] * len(sample.token_ids), policy_version=step - 1
        )
        for sample in batch.samples
    ]
    return replace(batch, step=step, samples=samples)


def held_out() -> list[TrainingSample]:
    return [replace(sample, use="held_out") for sample in texts_of("run_a", 3).samples[:3]]


@pytest.mark.slow
def test_twenty_updates_of_texts_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """What is held out is measured in every batch, and changes nothing."""
    model, workspace = write_model(tmp_path / "model"), tmp_path / "workspace"
    run = write_run(
        workspace,
        "run_a",
        model,
        kind="sft",
        rollouts_per_example=1,
        env=[],
        data=[{"path": "texts.jsonl"}],
        max_steps=NUM_SFT_STEPS,
        seed=SEED,
        model={"lora": {"rank": RANK, "alpha": ALPHA}},
        optim={"lr": LR, "weight_decay": DECAY, "max_norm": MAX_NORM},
        scheduler={"type": "linear", "warmup_steps": WARMUP},
    )
    for step in range(1, NUM_SFT_STEPS + 1):
        batch = texts_of("run_a", step)
        held = [replace(sample, policy_version=step - 1) for sample in held_out()]
        put_batch(run, replace(batch, samples=[*batch.samples, *held]))
    config = trainer_config(workspace, model, max_tokens_per_micro_batch=96)
    train_until(config, lambda: published(run) == NUM_SFT_STEPS)

    losses, held_losses = list[float](), list[float]()

    def on_step(plain: PeftModel, loss: float) -> None:
        losses.append(loss)
        with torch.no_grad():
            held_losses.append(-torch.cat([loss_token_logprobs(plain, each) for each in held_out()]).mean().item())

    _, plain_adapter = plain_training(cross_entropy, token_mean, texts_of, NUM_SFT_STEPS, on_step)
    lines = [msgspec.json.decode(line) for line in run.trainer_metrics.read_text().splitlines()]
    for name, expected in (("loss", losses), ("supervised/loss", losses), ("held_out/loss", held_losses)):
        assert [line[name] for line in lines] == pytest.approx(expected, rel=1e-4), name
    assert losses[19] < losses[3], "the same texts"
    assert relative_difference(adapter(run, NUM_SFT_STEPS), plain_adapter) < 1e-3
    assert {line["samples"] for line in lines} == {8}, "those that are held out are not counted as trained"


NUM_SOFT = 4


def taught(run_id: str, step: int) -> TrainingBatch:
    """Texts whose tokens have soft targets of a teacher."""
    batch = texts_of(run_id, step)
    return replace(batch, samples=[with_soft(each, NUM_SOFT) for each in batch.samples])


def soft_logprobs(model: torch.nn.Module, sample: TrainingSample) -> Tensor:
    """Of each loss token the sum over its targets, by their probabilities."""
    logits = model(input_ids=torch.tensor([sample.token_ids])).logits[0]
    logprobs = torch.log_softmax(logits / sample.temperature, dim=-1)
    return torch.stack(
        [
            sum((prob * logprobs[at - 1, id] for id, prob in zip(ids, probs, strict=True)), torch.zeros(()))
            for at, (ids, probs) in enumerate(zip(sample.soft_ids, sample.soft_probs, strict=True))
            if ids
        ]
    )


def run_of_texts(workspace: Path, run_id: str, model: Path, batches: Callable[[str, int], TrainingBatch]) -> RunDir:
    run = write_run(
        workspace,
        run_id,
        model,
        kind="sft",
        rollouts_per_example=1,
        env=[],
        data=[{"path": "texts.jsonl"}],
        max_steps=NUM_STEPS,
        seed=SEED,
        model={"lora": {"rank": RANK, "alpha": ALPHA}},
        optim={"lr": LR, "weight_decay": DECAY, "max_norm": MAX_NORM},
        scheduler={"type": "linear", "warmup_steps": WARMUP},
    )
    for step in range(1, NUM_STEPS + 1):
        put_batch(run, batches(run_id, step))
    return run


def test_a_run_with_soft_targets_beside_two_others_reaches_what_a_plain_loop_reaches(tmp_path: Path) -> None:
    """And so do they: one of texts without, and one of rollouts."""
    model, workspace = write_model(tmp_path / "model"), tmp_path / "workspace"
    soft, hard = (run_of_texts(workspace, f"run_{batches.__name__}", model, batches) for batches in (taught, texts_of))
    rollouts = run_with_loss(workspace, "run_rollouts", model, {"delta": DELTA})
    runs = (soft, hard, rollouts)
    config = trainer_config(workspace, model, max_tokens_per_micro_batch=96)
    train_until(config, lambda: all(published(run) == NUM_STEPS for run in runs))
    losses = list[float]()
    plain = [
        plain_training(
            cross_entropy,
            batches=taught,
            on_step=lambda _, loss: losses.append(loss),
            logprobs_of=soft_logprobs,
        ),
        plain_training(cross_entropy, batches=texts_of),
        plain_training(),
    ]
    for run, (_, expected) in zip(runs, plain, strict=True):
        assert relative_difference(adapter(run, NUM_STEPS), expected) < 1e-4, run.run_id
    assert relative_difference(adapter(soft, NUM_STEPS), adapter(hard, NUM_STEPS)) > 1e-3
    lines = [msgspec.json.decode(line) for line in soft.trainer_metrics.read_text().splitlines()]
    assert [line["supervised/loss"] for line in lines] == pytest.approx(losses, rel=1e-4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    """Four losses, three means and a KL to the base in the same passes, batches split over several of them."""
    folder = tmp_path_factory.mktemp("losses")
    model, workspace = write_model(folder / "model"), folder / "workspace"
    runs = {run_id: run_with_loss(workspace, run_id, model, config) for run_id, (config, _, _) in LOSSES.items()}
    config = trainer_config(workspace, model, max_tokens_per_micro_batch=96)
    train_until(config, lambda: all(published(run) == NUM_STEPS for run in runs.values()))
    return runs


@pytest.mark.parametrize("run_id", LOSSES)
def test_each_of_several_runs_reaches_what_a_plain_loop_with_its_loss_reaches(
    runs: dict[str, RunDir], run_id: str
) -> None:
    _, sample_loss, mean = LOSSES[run_id]
    reached = adapter(runs[run_id], NUM_STEPS)
    assert relative_difference(reached, plain_training(sample_loss, mean)[1]) < 1e-4
    others = [adapter(runs[other], NUM_STEPS) for other in LOSSES if other != run_id]
    assert all(relative_difference(reached, other) > 1e-3 for other in others), "the losses must differ"


def test_metrics_of_a_run_tell_its_kl_to_the_base_when_it_asks(runs: dict[str, RunDir]) -> None:
    """Version 0 is the base itself."""
    lines = {
        run_id: [msgspec.json.decode(line) for line in run.trainer_metrics.read_text().splitlines()]
        for run_id, run in runs.items()
    }
    of_texts = {name for name in documented("trainer") if name.startswith(("supervised/", "held_out/"))}
    assert set(lines["run_kl"][0]) == set(documented("trainer")) - of_texts and len(of_texts) == 4, "docs/metrics.md"
    assert lines["run_kl"][0]["kl_base"] == pytest.approx(0, abs=1e-6) and lines["run_kl"][-1]["kl_base"] > 1e-4
    for run_id in LOSSES:
        assert [line["step"] for line in lines[run_id]] == list(range(1, NUM_STEPS + 1))
        assert all(("kl_base" in line) == (run_id == "run_kl") for line in lines[run_id])
        for name in ("importance_ratio/mean", "clipped_fraction", "mismatch_kl", "entropy", "grad_norm", "loss"):
            assert all(math.isfinite(line[name]) for line in lines[run_id]), name
        assert any(line["clipped_fraction"] > 0 for line in lines[run_id])
