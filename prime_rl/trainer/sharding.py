"""How the model is sharded over the ranks: FSDP2, each parameter in parts, the adapters whole on every rank.

Each decoder layer is one group: it is put together from all ranks for its own forward and again for its own backward,
so a rank never holds more than its part and about two whole layers. The adapters take no part in this: their gradients
are summed over ranks once for an update, not once for a pass. A rank alone shards nothing that is frozen.

Outside, what is trained as a whole is a `DTensor`: this module takes it apart and puts it together.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from prime_rl.trainer.world import World


def shard_model(model: nn.Module, world: World, replicated: Iterable[nn.Parameter]) -> None:
    """Bring a frozen `model` to the world's device, a part of it to each rank. A collective.

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
    _shard(model, mesh_of(world), MixedPrecisionPolicy(), whole)


def shard_trainable(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """The same for a model whose own weights are trained, on any number of ranks.

    It computes in `dtype`; weights and gradients stay in their own type. Gradients are summed over ranks, not averaged:
    each row carries the scale of its whole batch.
    """
    _shard(model, mesh, MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32), set())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def mesh_of(world: World) -> DeviceMesh:
    """All ranks in a row."""
    return init_device_mesh(world.device.type, (world.size,))


def _shard(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, ignored: set[nn.Parameter]) -> None:
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True, ignored_params=ignored)
    # Embedding, last norm and head: backward begins where forward ends, so they stay together in between.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=ignored)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that a Hugging Face model declares must stay whole."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def part_here(tensor: Tensor) -> Tensor:
    """This rank's part, on the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut(whole: Tensor, like: Tensor) -> Tensor:
    """A copy of this rank's part of `whole`, cut as `like` is. Every rank has all of `whole`, so nothing is sent."""
    if not isinstance(like, DTensor):
        return whole.clone()
    placed = distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    part: Tensor = placed.to_local().clone()
    return part


def join(part: Tensor, like: Tensor) -> Tensor:
    """The whole of which every rank has a part, cut as `like` is. A collective."""
    if not isinstance(like, DTensor):
        return part
    placed = DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
    whole: Tensor = placed.full_tensor()
    return whole
