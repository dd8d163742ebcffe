"""The flags of `prl fit`, and the shapes of models by name: no torch, so that help and errors come at once."""

from __future__ import annotations

import argparse
from typing import Any

from prime_rl.configs.base import build, merge, read_argv
from prime_rl.configs.multinode import FlagError, FlagParser
from prime_rl.configs.system import SystemConfig

EXAMPLE = "--model qwen3-8b --seq-len 16384 --runs 8 --gpu-memory 80"

_QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-6}
_LLAMA = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}


def _shape(family: dict[str, Any], width: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    return {"tie_word_embeddings": True, **family, **sizes, "num_attention_heads": heads, **more}


# Figures of the models' own config.json on the Hugging Face Hub, by its names.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _shape(_QWEN3, 1024, 3072, 28, 16),
    "qwen3-1.7b": _shape(_QWEN3, 2048, 6144, 28, 16),
    "qwen3-4b": _shape(_QWEN3, 2560, 9728, 36, 32),
    "qwen3-8b": _shape(_QWEN3, 4096, 12288, 36, 32, tie_word_embeddings=False),
    "llama3.2-1b": _shape(_LLAMA, 2048, 8192, 16, 32, head_dim=64),
    "llama3.2-3b": _shape(_LLAMA, 3072, 8192, 28, 24, head_dim=128),
    "smollm2-135m": _shape(_LLAMA, 576, 1536, 30, 9, head_dim=64, num_key_value_heads=3, vocab_size=49_152),
}
_ENDING = f"""\
N may be auto for --tokens and --runs. NAME is a model folder, or one of
{", ".join(SHAPES)}.
@ FILE is the system file (TOML) of prl up; --key.subkey VALUE overrides one of its fields.
"""


def fit_parser() -> FlagParser:
    """The parser of the flags; `@ FILE` and the overrides of its keys are not among them."""
    parser = FlagParser("prl fit", EXAMPLE, _ENDING)
    add = parser.add_argument
    add("--model", metavar="NAME", help="base model (default: that of FILE)")
    add("--seq-len", type=int, metavar="N", help="longest sample, in tokens")
    add("--tokens", type=_number_or_auto, metavar="N", help="tokens of a pass (default: max_tokens_per_micro_batch)")
    add("--runs", type=_number_or_auto, metavar="N", help="slots (default: max_concurrent_runs)")
    add("--rank", type=int, metavar="R", help="largest rank of the adapters")
    add("--gpu-memory", type=float, metavar="GiB", help="memory of a GPU (default: this machine's, else 80)")
    add("--full-finetune", action="store_true", help="train the whole model instead of adapters")
    add("--gpus", default="1", metavar="N", help="GPUs that the trainer shards the model over (default 1), or all")
    add("--json", action="store_true", help="print JSON")
    return parser


def _number_or_auto(text: str) -> int | str:
    if text == "auto" or text.isdecimal():
        return text if text == "auto" else int(text)
    raise argparse.ArgumentTypeError(f"invalid value {text!r}: must be a whole number, or auto")


def read_flags(argv: list[str]) -> tuple[argparse.Namespace, SystemConfig]:
    """The flags, and the system file with what they say. Raises FlagError or ConfigError.

    `gpus` is a number, or None for all.
    """
    args, rest = fit_parser().parse_known_args(argv)
    if args.gpus != "all" and not (args.gpus.isdecimal() and int(args.gpus)):
        raise FlagError(f"--gpus {args.gpus}: must be 1 or more, or all")
    args.gpus = None if args.gpus == "all" else int(args.gpus)
    if args.gpu_memory is not None and not 0 < args.gpu_memory < float("inf"):
        raise FlagError(f"--gpu-memory {args.gpu_memory:g}: must be above 0")
    data, source = read_argv(rest)
    given = {
        ("model", "name"): args.model,
        ("seq_len",): args.seq_len,
        ("trainer", "max_tokens_per_micro_batch"): args.tokens,
        ("max_concurrent_runs",): args.runs,
        ("lora", "rank"): args.rank,
        ("full_finetune",): args.full_finetune or None,
    }
    for keys, value in given.items():
        nested: Any = value
        for key in reversed(keys):
            nested = {key: nested}
        data = merge(data, nested) if value is not None else data
    if not data.get("model"):
        raise FlagError("no model: name one with --model NAME, or a system file with @ FILE")
    return args, build(SystemConfig, data, source)
