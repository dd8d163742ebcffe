"""The whole system, and what is recorded of it: the same code at the shape of a real model on a GPU and vLLM, and tiny
on a CPU and the embedded engine, where it shows that the code itself works.

The weights are random: what is tested is memory, speed and the agreement of trainer and inference, not learning.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from prime_rl.configs.system import SHAPES
from tests.inference_support import CHAT_TEMPLATE, EOS, LETTERS, PAD
from tests.system_support import ROOT, Workspace, read_metrics

RESULTS = Path(os.environ.get("PRL_ACCEPTANCE_RESULTS", ROOT / "build" / "acceptance.json"))
RUN_IDS = ("run_a", "run_b")
TINY_MODEL = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Scale:
    """One size of the same system.

    Attributes:
        model: entries of the model's config.
        max_tokens: of an answer; random weights hardly ever end one sooner.
        pass_tokens: token positions of a pass. A batch has several times as many, so that passes are full.
        max_mismatch_kl: nats. In bfloat16 trainer and engine differ by about 0.05 a log-probability, which is 1e-3.
    """

    name: str
    device: str
    model: dict[str, Any]
    num_updates: int
    batch_size: int
    seq_len: int
    max_tokens: int
    pass_tokens: int
    max_mismatch_kl: float
    inference: dict[str, Any]
    engine: str = "vllm"


QWEN = Scale(
    name="qwen3-0.6b",
    device="cuda",
    model=SHAPES["qwen3-0.6b"],
    num_updates=20,
    batch_size=64,
    seq_len=1024,
    max_tokens=512,
    pass_tokens=16_384,
    max_mismatch_kl=5e-3,
    # Beside the trainer on one GPU.
    inference={"vllm": {"gpu_memory_utilization": 0.4}},
)
TINY = Scale(
    name="tiny",
    device="cpu",
    model=TINY_MODEL,
    num_updates=3,
    batch_size=16,
    seq_len=128,
    max_tokens=12,
    pass_tokens=512,
    max_mismatch_kl=1e-5,
    inference={"num_threads": 1},
    engine="embedded",
)


@dataclass(frozen=True)
class Found:
    """What a system of two runs did. Memory in GiB; rates in tokens/s."""

    scale: str
    device: str
    updates: dict[str, int]
    peak_gib: float
    predicted_gib: float
    worst_mismatch_kl: float
    trainer_tokens_per_s: dict[str, float]
    sampled_tokens_per_s: dict[str, float]

    def record(self) -> None:
        """Print, and write to RESULTS."""
        print(f"\n{json.dumps(asdict(self), indent=2)}")
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def write_model(folder: Path, scale: Scale) -> Path:
    """Random weights of the scale's shape, and a tokenizer of letters; what is left of the vocabulary is words."""
    model = {**scale.model, "max_position_embeddings": 4 * scale.seq_len}
    words = [PAD, EOS, *LETTERS]
    vocabulary = words + [f"{_letters(number)}" for number in range(len(words), model["vocab_size"])]
    core = Tokenizer(models.WordLevel({word: idx for idx, word in enumerate(vocabulary)}, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, pad_token=PAD)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**model, pad_token_id=0, eos_token_id=1)
    dtype = torch.bfloat16 if scale.device == "cuda" else torch.float32
    with torch.device(scale.device):
        built = AutoModelForCausalLM.from_config(config, dtype=dtype)
    built.to("cpu").save_pretrained(folder)
    return folder


def _letters(number: int) -> str:
    """A word for each number, of three letters or more, so that no two are alike and none is a letter."""
    digits = ""
    for _ in range(4):
        number, digit = divmod(number, 26)
        digits += chr(ord("a") + digit)
    return digits


def write_workspace(folder: Path, scale: Scale) -> Workspace:
    output_dir, model = folder / "workspace", write_model(folder / "model", scale)
    output_dir.mkdir()
    system = {
        "output_dir": str(output_dir),
        "max_concurrent_runs": len(RUN_IDS),
        "seq_len": scale.seq_len,
        "model": {"name": str(model)},
        "lora": {"rank": 16, "alpha": 32},
        "trainer": {"device": scale.device, "max_tokens_per_micro_batch": scale.pass_tokens},
        "inference": {"engine": scale.engine, "port": 0, **scale.inference},
    }
    path = folder / "system.toml"
    path.write_text(tomli_w.dumps(system))
    return Workspace(output_dir, path, model)


def run_toml(workspace: Workspace, scale: Scale, run_id: str) -> Path:
    run = {
        "batch_size": scale.batch_size,
        "rollouts_per_example": 8,
        "max_steps": scale.num_updates,
        "max_async_level": 1,
        "seed": RUN_IDS.index(run_id),
        "model": {"name": str(workspace.model), "lora": {"rank": 16 if run_id == "run_a" else 8}},
        # Small: what an answer is older by must not count as disagreement of trainer and engine.
        "optim": {"lr": 1e-5},
        "sampling": {"max_tokens": scale.max_tokens},
        "env": [{"id": "reverse-text", "args": {"wording": "short"}}],
        "ckpt": {"interval": scale.num_updates},
    }
    path = workspace.output_dir.parent / f"{run_id}.toml"
    path.write_text(tomli_w.dumps(run))
    return path


def train_two_runs(workspace: Workspace, scale: Scale) -> Found:
    """Both runs to their end, by `prl` as a user calls it; nothing is left running."""
    predicted = workspace.json("fit", "@", str(workspace.system_toml))
    workspace.up()
    for run_id in RUN_IDS:
        workspace.prl("runs", "add", str(run_toml(workspace, scale, run_id)), "--id", run_id)
    for run_id in RUN_IDS:
        workspace.wait(lambda run_id=run_id: workspace.state(run_id) == "finished", f"{run_id} to finish")
    workspace.prl("down")
    trainer = {run_id: read_metrics(workspace.run_dir(run_id).trainer_metrics) for run_id in RUN_IDS}
    orchestrator = {run_id: read_metrics(workspace.run_dir(run_id).orchestrator_metrics) for run_id in RUN_IDS}
    every = [line for lines in trainer.values() for line in lines]
    return Found(
        scale=scale.name,
        device=torch.cuda.get_device_name(0) if scale.device == "cuda" else "cpu",
        updates={run_id: len(lines) for run_id, lines in trainer.items()},
        peak_gib=max(line["memory/peak_gib"] for line in every),
        predicted_gib=predicted["peak_gib"],
        worst_mismatch_kl=max(line["mismatch_kl"] for line in every),
        trainer_tokens_per_s={run_id: _middle(lines) for run_id, lines in trainer.items()},
        sampled_tokens_per_s={run_id: _middle(lines) for run_id, lines in orchestrator.items()},
    )


def _middle(lines: list[dict[str, Any]]) -> float:
    """Of the tokens/s in `lines`, the one in the middle: the first updates warm up."""
    rates = sorted(line["tokens_per_s"] for line in lines if "tokens_per_s" in line)
    return float(rates[len(rates) // 2])
