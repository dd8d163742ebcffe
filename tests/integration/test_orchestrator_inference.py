"""The orchestrator against the real embedded engine, with a stand-in trainer that publishes random adapters.

The figures in a sample are checked by an independent model: Hugging Face and PEFT compute the logprobs of the
sampled tokens once more, under the version that the sample names.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from prime_rl.contract.files import mark_stable, staged_dir, wait_for
from prime_rl.contract.layout import OutputDir, RunDir, list_rollout_steps
from prime_rl.contract.status import InferenceStatus, RunStatus, is_alive, read_status
from prime_rl.contract.types import TrainingSample, read_batch
from prime_rl.lora.adapter_state import peft_names, save_peft
from prime_rl.orchestrator.orchestrator import run_to_the_end
from prime_rl.orchestrator.policy import ChatTokenizer
from prime_rl.orchestrator.recorder import as_turns
from tests.orchestrator_support import FIRST_BYTE, IM_END, make_model, make_run, run_config, stand_in_trainer, until
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.release
ROOT = Path(__file__).parents[2]
HIDDEN, HEAD_DIM, NUM_HEADS = 32, 8, 4
RANK = 4
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with random weights, large enough to distinguish its versions."""
    folder = make_model(tmp_path_factory.mktemp("orchestrator") / "model")
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    config = Qwen3Config(
        vocab_size=FIRST_BYTE + 256,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        eos_token_id=IM_END,
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def publish_random_adapter(run: RunDir, version: int) -> None:
    generator = torch.Generator().manual_seed(version)
    tensors = {}
    for layer in range(2):
        for name, num_out in (("q_proj", NUM_HEADS * HEAD_DIM), ("v_proj", 2 * HEAD_DIM)):
            name_A, name_B = peft_names(f"model.layers.{layer}.self_attn.{name}")
            tensors[name_A] = torch.randn(RANK, HIDDEN, generator=generator) * 0.2
            tensors[name_B] = torch.randn(num_out, RANK, generator=generator) * 0.2
    with staged_dir(run.broadcast_dir(version)) as folder:
        save_peft(folder, tensors, rank=RANK, alpha=8, target_modules=["q_proj", "v_proj"], base_model="base")
        mark_stable(folder)


@contextlib.contextmanager
def server(workspace: Path, model: Path, max_model_len: int = 256) -> Iterator[subprocess.Popen[bytes]]:
    workspace.mkdir(exist_ok=True)
    toml = workspace.parent / f"{workspace.name}.toml"
    toml.write_text(
        f'output_dir = "{workspace}"\nport = 0\nnum_threads = 1\nmax_num_seqs = 16\nmax_concurrent_runs = 1\n'
        f'[model]\nname = "{model}"\nmax_model_len = {max_model_len}\n'
        f'[model.lora]\nrank = {RANK}\ntarget_modules = ["q_proj", "v_proj"]\n'
    )
    log = (workspace.parent / f"{workspace.name}.log").open("ab")
    process = subprocess.Popen(
        [sys.executable, "-m", "prime_rl.inference.server", "@", str(toml)], cwd=ROOT, stdout=log, stderr=log
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()
            log.close()


def serving(workspace: Path, process: subprocess.Popen[bytes]) -> str | None:
    """The base URL once the server of `process` answers."""
    assert process.poll() is None, f"the server ended with {process.returncode}"
    status = read_status(OutputDir(workspace).inference_status, InferenceStatus)
    alive = status is not None and status.pid == process.pid and is_alive(status, status.updated_at)
    return status.base_url if status is not None and alive and status.state == "serving" else None


@contextlib.asynccontextmanager
async def trainer(run: RunDir) -> AsyncIterator[None]:
    task = asyncio.create_task(stand_in_trainer(run, publish_random_adapter))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def samples(run: RunDir, num_steps: int) -> list[tuple[int, TrainingSample]]:
    return [(step, s) for step in range(1, num_steps + 1) for s in read_batch(run.rollout_file(step)).samples]


def turns_of(sample: TrainingSample) -> list[list[float]]:
    """The logprobs of each turn of the policy."""
    marked = zip(sample.loss_mask, sample.logprobs, strict=True)
    return [[p for _, p in group] for is_ours, group in itertools.groupby(marked, lambda item: item[0]) if is_ours]


def recomputed(model: Path, run: RunDir, sample: TrainingSample, version: int) -> torch.Tensor:
    """Logprobs of the sampled tokens under `version`."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if version:
        policy = PeftModel.from_pretrained(policy, str(run.broadcast_dir(version)))
    with torch.no_grad():
        logits_TV = policy(torch.tensor([sample.token_ids])).logits[0] / TEMPERATURE
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
    at = [t for t, loss in enumerate(sample.loss_mask) if loss]
    return torch.stack([logprobs_TV[t - 1, sample.token_ids[t]] for t in at])


def test_prompts_are_what_transformers_makes_of_them(model: Path) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(model), ChatTokenizer.load(str(model))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Grüß Gott 🙂 <|im_end|> {{ 1 }}"},
    ]
    prompt = ours.prompt(as_turns(messages))  # type: ignore[arg-type]
    assert prompt == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    turns = [*messages, {"role": "assistant", "content": "Servus."}, {"role": "user", "content": "More"}]
    answer = theirs.encode("Servus.", add_special_tokens=False)
    whole = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert prompt + answer + ours.continuation(as_turns(turns), num_seen=3) == whole  # type: ignore[arg-type]


async def test_samples_come_from_the_version_that_they_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_rl.orchestrator.policy.CLOSE_TIMEOUT_S", PATIENCE_S)
    workspace = tmp_path / "workspace"
    with server(workspace, model) as process:
        wait_for(lambda: bool(serving(workspace, process)), "the server", timeout_s=PATIENCE_S)
        run = make_run(workspace)
        config = run_config(
            model,
            batch_size=8,
            rollouts_per_example=4,
            max_steps=6,
            max_async_level=2,
            sampling={"max_tokens": 12, "temperature": TEMPERATURE},
            env=[
                {"id": "reverse-text", "args": {"wording": "short"}},
                {"id": "guess-number", "args": {"wording": "short", "max_turns": 3}},
            ],
            eval={"interval": 3, "num_examples": 2},
            ckpt={"interval": 2},
        )
        async with trainer(run):
            code = await asyncio.wait_for(run_to_the_end(config, run, lambda: False), PATIENCE_S)
        status = read_status(run.status, RunStatus)
        assert (code, status and status.state) == (0, "finished"), status
        answer = httpx.get(f"{serving(workspace, process)}/models", timeout=PATIENCE_S)
        served = [card["id"] for card in answer.json()["data"]]
    assert served == [str(model)], "every adapter of the run was unloaded"
    assert len({sample.policy_version for _, sample in samples(run, 6)}) > 1
    noticed = []
    for step, sample in samples(run, 6):
        assert max(0, step - 3) <= sample.policy_version <= step - 1
        turns = turns_of(sample)
        num_turns = 3 if sample.example_id.startswith("guess-number/") else 1
        assert (
            len(turns) == len(sample.turn_versions) == num_turns and min(sample.turn_versions) == sample.policy_version
        )
        by_version = {version: recomputed(model, run, sample, version) for version in set(sample.turn_versions)}
        starts = itertools.accumulate((len(turn) for turn in turns), initial=0)
        for turn, start, version in zip(turns, starts, sample.turn_versions, strict=False):
            own = by_version[version][start : start + len(turn)]
            torch.testing.assert_close(torch.tensor(turn), own, atol=1e-3, rtol=1e-3)
        logprobs = torch.tensor([logprob for turn in turns for logprob in turn])
        other = recomputed(model, run, sample, max(sample.turn_versions) + 1)
        noticed.append(not torch.allclose(logprobs, other, atol=1e-1))
    # One token alone may be as likely under two versions.
    assert sum(noticed) > 0.9 * len(noticed), "another version would have been noticed"


async def test_a_killed_server_that_comes_back_elsewhere_costs_no_step(model: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    run = make_run(workspace)
    config = run_config(model, max_steps=6, max_async_level=0, sampling={"max_tokens": 12})
    with server(workspace, model) as first:
        running = asyncio.create_task(run_to_the_end(config, run, lambda: False))
        await until(lambda: bool(serving(workspace, first)), "the server", PATIENCE_S)
        await until(lambda: list_rollout_steps(run) == [1], "the first batch", PATIENCE_S)
        publish_random_adapter(run, 1)
        await until(lambda: list_rollout_steps(run) == [1, 2], "a batch of version 1", PATIENCE_S)
        first.kill()
        first.wait()
    publish_random_adapter(run, 2)

    def names_it() -> bool:
        status = read_status(run.status, RunStatus)
        return status is not None and "inference" in (status.waiting_on or "")

    await until(names_it, "the lost server to be named", PATIENCE_S)
    with server(workspace, model) as second:
        async with trainer(run):
            assert await asyncio.wait_for(running, PATIENCE_S) == 0
        assert second.poll() is None
    assert list_rollout_steps(run) == [1, 2, 3, 4, 5, 6]
    assert [sample.policy_version for _, sample in samples(run, 6)] == [v for v in range(6) for _ in range(4)]
