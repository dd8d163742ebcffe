"""`prl fit`: what a pass takes, what fits, how to share a GPU. `python -m prime_rl.trainer.fit --help`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prime_rl.configs.base import ConfigError, FlagError
from prime_rl.configs.system import read_fit_flags
from prime_rl.utils.process import EXIT_INTERRUPTED
from prime_rl.utils.runtime import complain, heavy_imports

if TYPE_CHECKING:
    from prime_rl.trainer.capacity import Answer


def main(argv: Sequence[str]) -> int:
    """0 when all was answered, also that nothing fits.

    2 for wrong use, an unknown model or one without support, and where "auto" stands for no number.
    """
    try:
        args, system = read_fit_flags(list(argv))
    except (FlagError, ConfigError) as error:
        complain("prl fit", error)
        return 2
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # torch and transformers take seconds to import: not before the flags are read and checked.
    with heavy_imports():
        from prime_rl.trainer.capacity import DoesNotFit, answer
        from prime_rl.trainer.memory import UnknownModel
        from prime_rl.trainer.model import ModelError

    try:
        found = answer(system, args.gpu_memory, args.gpus)
    except (UnknownModel, ModelError, DoesNotFit) as error:
        complain("prl fit", error)
        return 2
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    print(json.dumps(found.as_json()) if args.json else _table(found))
    return 0


def _table(found: Answer) -> str:
    memory, setting = found.memory, found.setting
    lora = setting.lora
    trained = f"{setting.num_runs} runs of rank {lora.rank}" if lora else "all weights trained"
    lines = [
        f"{found.model} in {found.dtype}, {trained}, one pass of "
        f"{setting.num_rows} x {setting.row_tokens:,} tokens, {found.hardware}",
        "",
    ]
    sizes = {
        "weights": memory.weights,
        "adapters and their gradients" if lora else "gradients": memory.adapters,
        "optimizer": memory.optimizer,
        "saved activations": memory.activations,
        "head": memory.head,
        "backward": memory.work,
        "peak of a pass": memory.peak,
        "room on the device": found.capacity.usable,
    }
    if setting.offloads:
        sizes["saved in host memory"] = memory.offloaded
    lines += [f"  {name:<30}{size / 2**30:>9.2f} GiB" for name, size in sizes.items()]
    lines += ["", *(f"  {name:<30}{value}" for name, value in _advice(found).items())]
    return "\n".join(lines)


AGAIN_KEY = "trainer.model.activation_checkpointing"


def _advice(found: Answer) -> dict[str, str]:
    from prime_rl.trainer.capacity import AGAIN

    capacity = found.capacity
    tokens = f"{capacity.max_tokens:>9,} tokens" if capacity.max_tokens else "none: a row of seq_len does not fit"
    runs = f"{capacity.max_runs:>9,}" if capacity.max_runs else "none: this pass does not fit"
    advice = {"largest micro-batch": tokens, "most runs with this pass": runs}
    advice["computed again"] = f"{AGAIN[found.again]} ({AGAIN_KEY} = {json.dumps(found.again)})"
    if found.on_gpu:
        split = found.split
        advice["one GPU for both"] = (
            f"{found.share_key} = {split.gpu_memory_utilization:.2f}, with a KV cache of "
            f"{split.kv_cache_tokens:,} tokens"
            if split
            else "does not fit: fewer tokens or runs, or a GPU for each"
        )
    return advice


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
