"""What the trainer's tests share: a tiny random Qwen3, run folders, recorded batches, the real loop in this process."""

from __future__ import annotations

import atexit
import functools
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tomli_w
import torch
from msgspec.structs import replace
from transformers import Qwen3Config, Qwen3ForCausalLM

from prime_rl.configs.base import merge
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.contract.layout import RunDir, list_steps
from prime_rl.contract.types import TrainingBatch, TrainingSample, write_batch
from prime_rl.lora.adapter_state import load_peft
from prime_rl.trainer.train import train
from prime_rl.trainer.world import World, setup_world
from tests.patience import PATIENCE_S
from tests.warm import ROOT, Started, warm

VOCAB = 48


def tiny_model(seed: int = 0) -> Qwen3ForCausalLM:
    """Random weights, two layers of width 32; large enough weights that adapters matter."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).eval()


def write_model(folder: Path) -> Path:
    tiny_model().save_pretrained(folder)
    return folder


def write_run(workspace: Path, run_id: str, base: Path, **changes: Any) -> RunDir:
    """A run folder with a valid `control/orch.toml`."""
    run = RunDir(workspace / run_id)
    run.control.mkdir(parents=True)
    run.rollouts.mkdir()
    write_config(run, base, **changes)
    return run


def write_config(run: RunDir, base: Path, **changes: Any) -> None:
    config: dict[str, Any] = {
        "batch_size": 8,
        "rollouts_per_example": 4,
        "max_steps": 100,
        "model": {"name": str(base)},
        "optim": {"lr": 1e-2},
        "sampling": {"max_tokens": 16},
        "ckpt": {"interval": 100},
        "env": [{"id": "reverse-text"}],
    }
    (run.control / "orch.toml").write_text(tomli_w.dumps(merge(config, changes)))


def sample(
    rng: random.Random,
    *,
    num_tokens: int = 12,
    prompt: Sequence[int] = (),
    advantage: float | None = None,
    policy_version: int = 0,
) -> TrainingSample:
    """`prompt`, or one of four tokens, and a completion, `num_tokens` together; mu is near a uniform distribution."""
    mask = [at >= (len(prompt) or 4) for at in range(num_tokens)]
    return TrainingSample(
        token_ids=[*prompt, *(rng.randrange(VOCAB) for _ in mask[len(prompt) :])],
        loss_mask=mask,
        logprobs=[-math.log(VOCAB) + rng.gauss(0, 0.5) if on else 0.0 for on in mask],
        advantage=rng.choice([-1.0, 1.0]) * rng.uniform(0.5, 1.5) if advantage is None else advantage,
        reward=0.5,
        temperature=1.0,
        policy_version=policy_version,
        example_id="reverse-text/0",
    )


def make_batch(
    run_id: str,
    step: int,
    *,
    num_samples: int = 8,
    seed: int = 0,
    advantage: float | None = None,
    by_token: bool = False,
    group: int = 0,
    branches: int = 0,
) -> TrainingBatch:
    """A recorded batch: the same arguments give the same batch. Rows have 6 to 24 tokens.

    Args:
        by_token: every other sample has an advantage for each token.
        group: so many samples at a time begin with the same 36 tokens more.
        branches: so many samples at a time are of one rollout.
    """
    rng = random.Random(f"{seed}/{step}")
    samples, prompt = [], list[int]()
    for number in range(num_samples):
        if group and number % group == 0:
            prompt = [rng.randrange(VOCAB) for _ in range(36)]
        num_tokens = len(prompt) + rng.randrange(6, 25)
        one = sample(rng, num_tokens=num_tokens, prompt=prompt, advantage=advantage, policy_version=step - 1)
        samples.append(one)
    if by_token:
        samples[::2] = [
            replace(each, token_advantages=[rng.gauss(0, 1) if on else 0.0 for on in each.loss_mask])
            for each in samples[::2]
        ]
    if branches:
        samples = [replace(each, rollout_id=f"r{at // branches}") for at, each in enumerate(samples)]
    return TrainingBatch(run_id, step, samples, {"position": step})


def with_soft(one: TrainingSample, num: int, seed: int = 0) -> TrainingSample:
    """As a supervised text, with `num` tokens of a teacher for each of its loss tokens."""
    rng = random.Random(f"{seed}/{num}/{one.token_ids}")
    ids = [rng.sample(range(VOCAB), num) if on else [] for on in one.loss_mask]
    weights = [[rng.random() for _ in each] for each in ids]
    mass = rng.uniform(0.7, 1.0)
    probs = [[mass * weight / sum(each) for weight in each] for each in weights]
    logprobs = [0.0] * len(one.token_ids)
    return replace(one, use="supervised", logprobs=logprobs, soft_ids=ids, soft_probs=probs)


def put_batch(run: RunDir, batch: TrainingBatch) -> None:
    """In the place of what may be there: `write_batch` replaces nothing."""
    run.rollout_file(batch.step).unlink(missing_ok=True)
    write_batch(run.rollout_file(batch.step), batch)


def put_batches(run: RunDir, num_steps: int, **arguments: Any) -> None:
    for step in range(1, num_steps + 1):
        put_batch(run, make_batch(run.run_id, step, **arguments))


def trainer_config(workspace: Path, base: Path, **changes: Any) -> TrainerConfig:
    config = {
        "output_dir": workspace,
        "model": {"name": str(base), "lora": {"rank": 16, "alpha": 32}},
        "seq_len": 64,
        "max_tokens_per_micro_batch": 256,
        "device": "cpu",
        "watch": {"rescan_s": 0.2},
    }
    return TrainerConfig.model_validate(merge(config, changes))


def whole_config(
    workspace: Path, base: Path, *, broadcast: dict[str, Any] | None = None, **changes: Any
) -> TrainerConfig:
    """The same trainer for one run that has the whole model."""
    config = trainer_config(
        workspace, base, **merge({"max_concurrent_runs": 1, "num_threads": 1}, changes)
    ).model_dump()
    del config["model"]["lora"]
    return TrainerConfig.model_validate(config | {"broadcast": broadcast or {}})


@functools.cache
def solo_world() -> World:
    """The process group of one that all tests of this process share."""
    world = setup_world("cpu", PATIENCE_S, num_threads=1)
    atexit.register(world.close)
    return world


def train_until(config: TrainerConfig, done: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """The real training loop in this process, until `done()` holds."""
    deadline = time.monotonic() + timeout_s

    def stop() -> bool:
        assert time.monotonic() < deadline, "the trainer did not get there"
        return done()

    train(config, solo_world(), stop)


def start_trainer(config: TrainerConfig, folder: Path, *, num_ranks: int = 1) -> subprocess.Popen[bytes]:
    """The real process (or torchrun with several), with its output in `folder/log`."""
    file = _write(config, folder)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [sys.executable, *(torchrun if num_ranks > 1 else []), "-m", "prime_rl.trainer.train", "@", str(file)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def start_warm_trainer(config: TrainerConfig, folder: Path) -> Started:
    """The same without the seconds that its imports take; its output replaces what was in `folder/log`."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    argv = ["@", str(_write(config, folder))]
    return warm("prime_rl.trainer.train").start(argv, env=environment, cwd=ROOT, log=folder / "log")


def check_refused(words: Sequence[str], code: int, text: str) -> None:
    """The command ends with this code, and with one line on standard error that has `text` in it."""
    done = warm("prime_rl.trainer.train").run(words, env=os.environ, cwd=ROOT, timeout_s=PATIENCE_S)
    assert done.returncode == code, done.stderr
    assert text in done.stderr and done.stderr.count("\n") == 1 and not done.stdout


def _write(config: TrainerConfig, folder: Path) -> Path:
    file = folder / "trainer.toml"
    file.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True, exclude_unset=True)))
    return file


def published(run: RunDir) -> int:
    """The newest complete version."""
    return max(list_steps(run.broadcast, stable_only=True), default=0)


def adapter(run: RunDir, step: int) -> dict[str, torch.Tensor]:
    return load_peft(run.broadcast_dir(step))[0]


def relative_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm, of the whole adapter."""
    assert one.keys() == other.keys()
    difference = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    norm = sum(float(tensor.double().square().sum()) for tensor in other.values())
    return math.sqrt(difference / norm)
