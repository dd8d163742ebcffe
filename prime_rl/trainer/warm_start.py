"""Version 0 of a run that starts from an adapter (`[init]`), which `prl` has put into the run's `init/`.

The run then computes what that adapter computes, to the last bit where rank, alpha and type are the same. A rank above
the adapter's, and modules that it does not adapt, keep their random A and a B of zero: they add nothing yet, and
learn. Moments of an optimizer are taken over where they lie beside the adapter; rates start at step 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from prime_rl.contract.layout import RunDir
from prime_rl.contract.peft import has_adapter
from prime_rl.lora.adapter_state import AdapterConfig
from prime_rl.lora.tensor_files import misfit, shapes_of


def check_init(run: RunDir, wanted: str) -> None:
    """Raises ValueError when the run asks to start from the adapter `wanted` and `prl` has not put it there."""
    if not has_adapter(run.init):
        raise ValueError(
            f"init.from = {wanted!r}, but {run.init} has no adapter: add the run with prl runs add, which puts it there"
        )


@torch.no_grad()
def begun_from(
    fresh: Mapping[str, Tensor], source: Mapping[str, Tensor], config: AdapterConfig, *, rank: int, scale: float
) -> dict[str, Tensor]:
    """`fresh` (the run's start values under PEFT names, of `rank`) with the adapter `source` put into it.

    `scale` is the run's alpha / rank: B takes up the difference to the source's. ValueError when it does not fit.
    """
    if config.rank > rank:
        raise ValueError(f"the adapter has rank {config.rank}, the run model.lora.rank = {rank}: must be at most that")
    if problem := _problem(fresh, source, config.rank):
        raise ValueError(f"the adapter does not fit the model: {problem}")
    factor = config.scaling / scale
    begun = dict(fresh)
    for name, tensor in source.items():
        whole = begun[name].float().clone()
        if _is_a(name):
            whole[: config.rank] = tensor.float()
        else:
            whole.zero_()[:, : config.rank] = tensor.float() * factor
        begun[name] = whole
    return begun


def _problem(fresh: Mapping[str, Tensor], source: Mapping[str, Tensor], rank: int) -> str | None:
    """What is wrong with `source`; None when each of its modules is in the model and whole."""
    adapted = {_module(name) for name in source}
    wanted = {
        name: (rank, whole.shape[1]) if _is_a(name) else (whole.shape[0], rank)
        for name, whole in fresh.items()
        if _module(name) in adapted
    }
    return misfit(shapes_of(source), wanted) if source else "it has no tensors"


def _module(name: str) -> str:
    return name.replace(".lora_A.", ".lora_B.")


def _is_a(name: str) -> bool:
    return name.endswith(".lora_A.weight")
