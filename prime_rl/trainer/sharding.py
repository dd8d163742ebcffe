"""How the model lies over the ranks: FSDP2, of each parameter a part on each rank; the adapters whole on every rank.

Each decoder layer is one group: it is put together from all ranks for its own forward and again for its own backward,
so a rank never holds more than its part and about two whole layers. The adapters take no part in this: their gradients
are summed over ranks once for an update, not once for a pass. A rank alone shards nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from prime_rl.trainer.world import World


def shard_model(model: nn.Module, world: World, replicated: Iterable[nn.Parameter]) -> None:
    """Bring `model` to the world's device, a part of it to each rank. A collective.

    A layer is moved to the device and cut before the next one is, so a device never holds the whole model.

    Args:
        replicated: parameters that stay whole.
    """
    if world.size == 1:
        model.to(world.device)
        return
    whole = set(replicated)
    for parameter in whole:
        parameter.data = parameter.data.to(world.device)
    mesh = init_device_mesh(world.device.type, (world.size,))
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    # Embedding, last norm and head: backward begins where forward ends, so they stay together in between.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=whole)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that a Hugging Face model wants to be kept whole; none for a model that names none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
