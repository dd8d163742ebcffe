"""`prl fit`: what a pass takes, what fits, how to share a GPU. `python -m prime_rl.trainer.fit --help`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prime_rl.configs.base import ConfigError, ConfigProblem, build, merge, read_argv
from prime_rl.configs.system import SystemConfig
from prime_rl.utils.logger import complain

if TYPE_CHECKING:
    from prime_rl.trainer.fit.answer import Answer

EPILOG = """\
NAME is a model folder, or a shape by name: qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, llama3.2-1b, llama3.2-3b,
smollm2-135m. @ FILE is the system file of prl up; --key.subkey VALUE overrides one of its fields.

Examples:
  prl fit --model qwen3-8b --seq-len 16384 --runs 8
  prl fit @ configs/demo/system.toml --gpu-memory 24 --json
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prl fit",
        usage="prl fit [@ FILE] [--model NAME] [OPTIONS] [--KEY VALUE ...]",
        description="Show what a pass of the trainer needs in GPU memory, and what fits. Needs no GPU.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="NAME", help="the base model (default: that of FILE)")
    add("--seq-len", type=_whole, metavar="N", help="longest sample, in tokens")
    add("--tokens", type=_whole, metavar="N", help="tokens of a pass (default: max_tokens_per_micro_batch)")
    add("--runs", type=_whole, metavar="N", help="slots (default: max_concurrent_runs)")
    add("--rank", type=_whole, metavar="R", help="largest rank of the adapters")
    add("--gpu-memory", type=_positive, metavar="GB", help="memory of a GPU (default: that of this machine, else 80)")
    add("--gpus", type=_whole, default=1, metavar="N", help="GPUs that the trainer shards the model over (default 1)")
    add("--json", action="store_true", help="print JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """0 when all was answered, also that nothing fits; 2 for wrong use or an unknown model."""
    args, rest = make_parser().parse_known_args(argv)
    try:
        system = read_system(args, rest)
    except ConfigError as error:
        complain("prl fit", error)
        return 2
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # torch and transformers take seconds to import: not before the question is known to be one.
    from prime_rl.trainer.fit.answer import answer
    from prime_rl.trainer.fit.shapes import UnknownModel

    try:
        found = answer(system, args.gpu_memory, args.gpus)
    except UnknownModel as error:
        complain("prl fit", error)
        return 2
    print(json.dumps(found.as_json()) if args.json else _table(found))
    return 0


def read_system(args: argparse.Namespace, rest: Sequence[str]) -> SystemConfig:
    """The system file with what the flags say. Raises ConfigError."""
    data, source = read_argv(rest)
    flags: dict[str, Any] = {
        "model": {"name": args.model} if args.model else {},
        "lora": {"rank": args.rank} if args.rank else {},
        "trainer": {"max_tokens_per_micro_batch": args.tokens} if args.tokens else {},
    }
    flags |= {"seq_len": args.seq_len} if args.seq_len else {}
    flags |= {"max_concurrent_runs": args.runs} if args.runs else {}
    data = merge(data, {key: value for key, value in flags.items() if value != {}})
    if not data.get("model"):
        problem = "no model: name one with --model NAME, or a system file with @ FILE"
        raise ConfigError(source, [ConfigProblem("", problem)])
    system = build(SystemConfig, data, source)
    if system.full_finetune:
        raise ConfigError(source, [ConfigProblem("full_finetune", "only adapters can be predicted: remove it")])
    return system


def _table(found: Answer) -> str:
    memory, setting = found.memory, found.setting
    rows = max(1, setting.tokens // setting.seq_len)
    lines = [
        f"{found.model} in {found.dtype}, {setting.num_runs} runs of rank {setting.lora.rank}, one pass of {rows} x "
        f"{setting.tokens // rows:,} tokens, {found.hardware}",
        "",
    ]
    sizes = {
        "weights": memory.weights,
        "adapters and their gradients": memory.adapters,
        "optimizer": memory.optimizer,
        "saved activations": memory.activations,
        "head": memory.head,
        "backward": memory.work,
        "peak of a pass": memory.peak,
        "room on the device": found.capacity.usable,
    }
    lines += [f"  {name:<30}{size / 2**30:>9.2f} GiB" for name, size in sizes.items()]
    lines += ["", *(f"  {name:<30}{value}" for name, value in _advice(found).items())]
    return "\n".join(lines)


def _advice(found: Answer) -> dict[str, str]:
    capacity = found.capacity
    tokens = f"{capacity.max_tokens:>9,} tokens" if capacity.max_tokens else "none: a row of seq_len does not fit"
    runs = f"{capacity.max_runs:>9,}" if capacity.max_runs else "none: this pass does not fit"
    advice = {"largest micro-batch": tokens, "most runs with this pass": runs}
    if found.on_gpu:
        split = found.split
        advice["one GPU for trainer and vLLM"] = (
            f"inference.vllm.gpu_memory_utilization = {split.gpu_memory_utilization:.2f}, with a KV cache of "
            f"{split.kv_cache_tokens:,} tokens"
            if split
            else "does not fit: fewer tokens or runs, or a GPU for each"
        )
    return advice


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {value}: must be at least 1")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"found {text}: must be a number of gigabytes above 0")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
