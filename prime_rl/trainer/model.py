"""The base model: loaded once, frozen, with an adapter slot for each run in its linear layers.

With several ranks each holds a shard of the base model (FSDP2) and all of the adapters, whose gradients are summed over
ranks once for an update, not once for a pass. Each decoder layer is one group: it is put together from all ranks for
its own forward and again for its own backward, so a rank never holds more than its part and about two whole layers. A
rank alone shards nothing that is frozen. Outside, what is trained as a whole is a `DTensor`: `part_here`, `cut` and
`join` take it apart and put it together.

All rows lie end to end in one (`packed_attention`). Those that begin alike share their first positions: these are
computed once, for the first of them, and the others look at what it found there. Where a model's attention is more than
causal, rows are padded at the right, so a token never sees the padding. The head is applied only where the caller asks
for the log-probability of a token, and its logits never exist as a whole.

Attention of a packed row is causal inside each sample: on a GPU in 16 bits one kernel for all samples, flash-attn's
where that is installed, else torch's own, over keys and values gathered sample by sample; elsewhere a call of torch's
scaled dot product for each sample, or each stretch of neighbours that are as long and share as much. The mask of tokens
x tokens that transformers would make never exists.

Dimensions: R rows, T tokens of a row, N loss tokens of all rows, H hidden size, V vocabulary; in attention N positions
of a packed row, M positions that its samples see, S samples, H query heads, K KV heads, D head size, R neighbours with
L positions of their own and P that they share.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import accumulate, chain, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging as transformers_logging

from prime_rl.configs.base import LoRAConfig
from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.lora.linear import AdapterRouting, MultiLoRALinear, apply_lora_to_model, sent
from prime_rl.lora.parts import (
    changes_logits,
    computed_again,
    fuse_mlps,
    fuse_norms,
    made_again,
    share_inputs,
    use_rotary,
)
from prime_rl.trainer.loss import token_logprobs
from prime_rl.trainer.world import World
from prime_rl.utils.runtime import give_back_holes

logger = logging.getLogger(__name__)

# Hidden states from which on the holes between the tensors of a pass are worth giving back.
LARGE_BYTES = 1 << 20
# The name of packed attention. No mask function is registered under it, so transformers makes no mask: causal is all
# that there is.
PACKED_ATTENTION = "prl_packed"


class ModelError(RuntimeError):
    """The base model cannot be loaded; the message is one line with its name and the reason."""


@dataclass(frozen=True)
class Targets:
    """The N tokens whose log-probability is asked for, of rows laid end to end.

    Attributes:
        at_N: the positions that predict them, 0 to R * T - 1. Found on the host: a GPU would be waited for.
    """

    at_N: Tensor
    ids_N: Tensor
    temperatures_N: Tensor


class LogprobHead(nn.Module):
    """In the place of a model's head: the same logits, or, where `targets` is set, their log-probabilities alone.

    Part of the model, so that a head that is sharded over ranks is put together before it is used.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight
        self.targets: Targets | None = None

    def forward(self, hidden_RTH: Tensor) -> Tensor:
        """Logits `[R, T, V]`, or log-probabilities, entropies, and where the targets are likeliest, `[3, N]`."""
        if self.targets is None:
            return nn.functional.linear(hidden_RTH, self.weight)
        hidden_NH: Tensor = _Gathered.apply(hidden_RTH.flatten(0, 1), self.targets.at_N)  # type: ignore[no-untyped-call]
        found = token_logprobs(hidden_NH, self.weight, self.targets.ids_N, self.targets.temperatures_N)
        # A norm makes zeros of numbers whose squares overflow: the logits would be equal, and finite.
        return torch.stack(found).masked_fill(~hidden_NH.any(-1), math.nan)


@dataclass(frozen=True)
class PolicyModel:
    """The frozen base with its adapters.

    Attributes:
        head: the last layer of `module`.
        layers: the adapted layers by their name in the base model.
        routing: maps rows to adapters; set it before each call.
        packs: whether rows lie end to end in one; else they are padded.
        remakes: whether backward makes cheap tables again; not where it computes whole layers again.
    """

    module: nn.Module
    head: LogprobHead
    layers: dict[str, MultiLoRALinear]
    routing: AdapterRouting
    vocab_size: int
    packs: bool = False
    remakes: bool = False

    def adapters(self) -> list[nn.Parameter]:
        """The parameters of all slots."""
        return [parameter for layer in self.layers.values() for parameter in (*layer.lora_A, *layer.lora_B)]

    def token_logprobs(
        self,
        token_ids_RT: Tensor,
        run_idxs: Sequence[int | None],
        targets: Targets,
        rows: PackedRows | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities and entropies, `[N]` in float32, in rows that use the adapters `run_idxs` (None: the base).

        The third has 1 where no token is likelier. Only the first carries a gradient.

        Args:
            rows: those that are packed into the one of `token_ids_RT`.
        """
        self.routing.set_rows(run_idxs, None if rows is None else rows.computed)
        self.head.targets = targets
        packed: dict[str, Any] = {}
        if rows is not None:
            segments = Segments.of(rows, token_ids_RT.device)
            packed = {"position_ids": segments.positions_1N, "segments": segments}
        try:
            with made_again() if self.remakes else nullcontext():
                found = self.module(input_ids=token_ids_RT, use_cache=False, **packed).logits
        finally:
            self.head.targets = None
        logprobs_N, entropy_N, is_top_N = found
        return logprobs_N, entropy_N.detach(), is_top_N.detach()

    def logits(self, token_ids_RT: Tensor, positions_K: Tensor, run_idxs: Sequence[int | None]) -> Tensor:
        """Logits `[R, K, V]` at `positions_K` of all rows."""
        self.routing.set_rows(run_idxs)
        output = self.module(input_ids=token_ids_RT, use_cache=False, logits_to_keep=positions_K)
        logits: Tensor = output.logits
        return logits


def load_model(config: TrainerModelConfig, lora: LoRAConfig | None, n_adapters: int, world: World) -> PolicyModel:
    """Load, freeze, adapt, shard over the ranks; without `lora` all weights are trained. Raises ModelError."""
    device_type = world.device.type
    if device_type == "cuda":
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    modes = {
        "checkpoints": config.checkpoints_on(device_type),
        "offloads": config.activation_offload,
        "packs": config.packs,
    }
    if lora is None:
        return train_whole(_load_base(config.name, torch.float32), mesh_of(world), dtype_on(config, world), **modes)
    base = _load_base(config.name, dtype_on(config, world))
    model = adapt_model(base, lora, n_adapters, lean_mlps=config.lean_mlps, **modes)
    shard_model(model.module, world, replicated=model.adapters())
    return model


def dtype_on(config: TrainerModelConfig, world: World) -> torch.dtype:
    """The type that the model computes in."""
    dtype: torch.dtype = getattr(torch, config.dtype_on(world.device.type))
    return dtype


def train_whole(
    base: nn.Module,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    *,
    checkpoints: bool = False,
    offloads: bool = False,
    packs: bool = False,
) -> PolicyModel:
    """Make all weights of `base` trainable, each a part on each rank of `mesh`. A collective.

    They are in float32 whatever the model computes in (`dtype`): small updates must not be rounded away. The rest is
    as in `adapt_model`.
    """
    base.requires_grad_(True)
    base.eval()
    head = _put_head(base)
    if checkpoints:
        checkpoint_layers(base, offloads=offloads)
    close_holes(base)
    vocab_size = base.get_input_embeddings().num_embeddings  # type: ignore[operator]
    packs = _set_up_attention(base, packs)
    shard_trainable(base, mesh, dtype)
    return PolicyModel(base, head, {}, AdapterRouting(1), vocab_size, packs)


def adapt_model(
    base: nn.Module,
    lora: LoRAConfig,
    n_adapters: int,
    *,
    checkpoints: bool = False,
    lean_mlps: bool = False,
    offloads: bool = False,
    packs: bool = False,
) -> PolicyModel:
    """Freeze `base` and give it adapter slots. Raises ModelError when a target module does not exist.

    With `checkpoints`, a layer keeps only its input for backward, where it is computed again; with `offloads`, in host
    memory. With `lean_mlps` gated MLPs do so too, and not what is around them. With `packs`, rows lie end to end in
    one, if the model's attention allows it.
    """
    base.requires_grad_(False)
    # Dropout off: a run must not depend on random numbers that its neighbours draw too.
    base.eval()
    fuse_norms(base)
    routing = AdapterRouting(n_adapters)
    try:
        layers = apply_lora_to_model(base, lora.rank, n_adapters, lora.target_modules, routing)
    except ValueError as error:
        raise ModelError(f"model.lora.{error}") from error
    share_inputs(base)
    fuse_mlps(base, keeps=not lean_mlps)
    if checkpoints:
        checkpoint_layers(base, offloads=offloads)
    if checkpoints or lean_mlps:
        close_holes(base)
    embeddings = base.get_input_embeddings()  # type: ignore[operator]
    packs = _set_up_attention(base, packs)
    return PolicyModel(base, _put_head(base), layers, routing, embeddings.num_embeddings, packs, not checkpoints)


def _set_up_attention(base: Any, packs: bool) -> bool:
    """Leave out the mask where attention is causal and nothing else, for padded rows too. Returns whether rows pack."""
    use_rotary(base)
    if can_pack(base):
        use_packed_attention(base)
        return packs
    if packs:
        logger.warning("rows are padded, not packed: the model's attention is more than causal")
    return False


def checkpoint_layers(base: nn.Module, *, offloads: bool = False) -> None:
    """Make every decoder layer keep its inputs alone, in host memory if it `offloads`, and compute itself again."""
    keep = _checkpoint_offloaded if offloads else _checkpoint
    for layer in decoder_layers(base):
        # Its attribute stays in place: names of parameters do not change.
        layer.forward = partial(keep, layer.forward)


def _checkpoint(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    options: dict[str, Any] = {"context_fn": lambda: (nullcontext(), computed_again())}
    # Nothing in a layer is random.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)


def _checkpoint_offloaded(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # From torch 2.13 on the host waits for neither copy. Inside, checkpoint's own hooks apply.
    with save_on_cpu(pin_memory=True):
        return _checkpoint(forward, *args, **kwargs)


def close_holes(base: nn.Module) -> None:
    """Make a pass on a CPU give the holes between its tensors back after every fourth layer.

    For passes that are to take little memory: it costs a twelfth of the time of one that keeps all. On the way back
    tensors go and no more are kept: there the holes do no harm.
    """
    for layer in decoder_layers(base)[::-1][::4]:
        layer.register_forward_hook(_give_back_holes)


def _give_back_holes(layer: nn.Module, inputs: Any, output: Any) -> None:
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    if hidden.is_cpu and hidden.requires_grad and hidden.nbytes >= LARGE_BYTES:
        give_back_holes()


def _put_head(base: nn.Module) -> LogprobHead:
    """Raises ModelError where the head is not the plain linear layer whose logits are the model's."""
    head: Any = base.get_output_embeddings()  # type: ignore[operator]
    if isinstance(head, MultiLoRALinear):
        raise ModelError("model.lora.target_modules: lm_head cannot have an adapter")
    if changes := changes_logits(base.config):
        raise ModelError(f"model.name: this kind of model is not supported: its config.json sets {changes}")
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        raise ModelError(f"model.name: this kind of model is not supported: its head is {head}")
    replaced = LogprobHead(head)
    base.set_output_embeddings(replaced)  # type: ignore[operator]
    return replaced


def _load_base(name: str, dtype: torch.dtype) -> nn.Module:
    path, is_offline = Path(name), os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "yes")
    if not path.is_dir() and (path.is_absolute() or name.count("/") != 1 or is_offline):
        raise ModelError(
            f"model.name = {name!r}: folder not found (from {Path.cwd()}); "
            "build one with prl make-base --out DIR, or name another"
        )
    transformers_logging.disable_progress_bar()
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.name = {name!r} cannot be loaded: {' '.join(str(error).split())}") from error
    logger.info("loaded %s: %d parameters", name, sum(p.numel() for p in model.parameters()))
    return model


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


@dataclass(frozen=True)
class PackedRows:
    """Rows end to end in one, of which each may share its first positions with the row before it.

    Attributes:
        seen: positions of each row, with those that it shares; they are computed once, in the row before it.
        shared: how many it shares, less than it sees; 0 for the first.
    """

    seen: tuple[int, ...]
    shared: tuple[int, ...]

    @property
    def computed(self) -> list[int]:
        """Positions that are computed for each row."""
        return [seen - shared for seen, shared in zip(self.seen, self.shared, strict=True)]

    @cached_property
    def places(self) -> list[npt.NDArray[np.int64]]:
        """For each row, where its positions lie in the packed one."""
        found: list[npt.NDArray[np.int64]] = []
        for shared, computed, stop in zip(self.shared, self.computed, accumulate(self.computed), strict=True):
            own = np.arange(stop - computed, stop)
            found.append(np.concatenate([found[-1][:shared], own]) if shared else own)
        return found


@dataclass(frozen=True)
class Stretch:
    """Neighbours that have as many positions of their own and share as many, the same ones.

    Attributes:
        shared, own: the parts of the packed row in which these positions lie, by number.
        num_shared, num_own: positions of each row.
    """

    num_rows: int
    num_shared: int
    num_own: int
    shared: tuple[int, ...]
    own: tuple[int, ...]

    def keys(self, parts: Sequence[Tensor]) -> Tensor:
        """`[R, K, P + L, D]` of the `parts` `[K, ..., D]` of keys or of values."""
        own = parts[self.own[0]] if len(self.own) == 1 else torch.cat([parts[part] for part in self.own], 1)
        own_RKLD = own.reshape(len(own), self.num_rows, self.num_own, -1).transpose(0, 1)
        if not self.shared:
            return own_RKLD
        return torch.cat([*(parts[part].expand(self.num_rows, -1, -1, -1) for part in self.shared), own_RKLD], 2)


@dataclass(frozen=True)
class Segments:
    """The places of the samples of a packed row.

    Attributes:
        stretches: of neighbours, in order.
        parts: positions of the parts into which stretches, and what is shared, cut the row.
        positions_1N: the place of each position in its own sample.
        ends_S, seen_ends_S: int32, 0 and the end of each sample among the computed and the seen positions, as the
            kernels want them.
        longest, longest_seen: positions of the longest sample.
        seen_M: where the seen positions lie; None where nothing is shared.
        masks: of samples that share, by what they share and have of their own; filled as they are needed. All layers
            keep the same ones for backward.
    """

    stretches: tuple[Stretch, ...]
    parts: list[int]
    positions_1N: Tensor
    ends_S: Tensor
    seen_ends_S: Tensor
    longest: int
    longest_seen: int
    seen_M: Tensor | None
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: PackedRows, device: torch.device) -> Segments:
        """The places of `rows`; the tensors are on `device`."""
        found, cuts = [], {0}
        first = start = 0
        for (shared, own), same in groupby(zip(rows.shared, rows.computed, strict=True)):
            num_rows = len(list(same))
            spans, stop = _spans(rows.places[first][:shared]), start + num_rows * own
            found.append(((num_rows, shared, own), spans, [(start, stop)]))
            cuts.update([stop, *chain(*spans)])
            first, start = first + num_rows, stop
        part_at = {cut: part for part, cut in enumerate(sorted(cuts))}

        def parts_in(spans: Iterable[tuple[int, int]]) -> tuple[int, ...]:
            return tuple(part for begin, end in spans for part in range(part_at[begin], part_at[end]))

        positions_N = np.concatenate([np.arange(*each) for each in zip(rows.shared, rows.seen, strict=True)])
        seen_M = sent(torch.from_numpy(np.concatenate(rows.places)), device) if any(rows.shared) else None
        ends_S, seen_ends_S = (
            sent(torch.tensor([0, *accumulate(each)], dtype=torch.int32), device) for each in (rows.computed, rows.seen)
        )
        return cls(
            stretches=tuple(Stretch(*sizes, parts_in(spans), parts_in(own)) for sizes, spans, own in found),
            parts=[stop - start for start, stop in pairwise(sorted(cuts))],
            positions_1N=sent(torch.from_numpy(positions_N)[None], device),
            ends_S=ends_S,
            seen_ends_S=seen_ends_S,
            longest=max(rows.computed),
            longest_seen=max(rows.seen),
            seen_M=seen_M,
        )

    def mask(self, stretch: Stretch, like: Tensor) -> Tensor | None:
        """`[L, P + L]`, in the type of `like`: 0 where a position may look, else -inf; None: plainly causal."""
        if not stretch.num_shared:
            return None
        asked = stretch.num_shared, stretch.num_own
        if asked not in self.masks:
            hidden = like.new_full((stretch.num_own, sum(asked)), -math.inf)
            self.masks[asked] = hidden.triu_(stretch.num_shared + 1)
        return self.masks[asked]


def _spans(places: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Start and stop of each run of neighbours."""
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1) if len(places) else []
    return [(int(run[0]), int(run[-1]) + 1) for run in runs]


def can_pack(model: nn.Module) -> bool:
    """True when attention of `model` is causal and nothing else: a window or a score of its own needs its own mask."""
    config: Any = model.config
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    return kinds == {"full_attention"} and config._attn_implementation in ("sdpa", PACKED_ATTENTION)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Let `model` take `segments=Segments(...)` with a packed row; without it attention is plainly causal."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    model.set_attn_implementation(PACKED_ATTENTION)


def packed_attention(
    module: nn.Module,
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KND: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Same arguments and result (`[1, N, H, D]`) as transformers' sdpa function."""
    query, key, value = query_1HND, key_1KND, value_1KND
    if segments is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _by_kernel(query, key, value, segments, scaling), None
    return _by_stretches(query, key, value, segments, scaling), None


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    """`[1, N, H, D]`."""
    q_NHD, k_NKD, v_NKD = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    if segments.seen_M is not None:
        k_NKD, v_NKD = (_Gathered.apply(each, segments.seen_M) for each in (k_NKD, v_NKD))  # type: ignore[no-untyped-call]
    return varlen_kernel()(q_NHD, k_NKD, v_NKD, segments, scaling)[None]


class _Gathered(torch.autograd.Function):
    """The rows `at_M` of a table. The gradient of one that is taken many times is summed in float32, or wider."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, at_M: Tensor) -> Tensor:
        ctx.save_for_backward(at_M)
        ctx.num_rows = len(table)
        return table.index_select(0, at_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (at_M,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        found = grad.new_zeros(ctx.num_rows, *grad.shape[1:], dtype=wide)
        return found.index_add_(0, at_M, grad.to(wide)).to(grad.dtype), None


VarlenKernel = Callable[[Tensor, Tensor, Tensor, Segments, float | None], Tensor]


@cache
def varlen_kernel() -> VarlenKernel:
    """The best one that is installed; named in the log. Query `[N, H, D]`, key and value `[M, K, D]`."""
    has_flash = importlib.util.find_spec("flash_attn") is not None
    logger.info("packed rows: attention of %s", "flash-attn" if has_flash else "torch (varlen_attn)")
    return _flash_attn if has_flash else _torch_varlen


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]

    # Causal from the end (flash-attn 2.1): the last query of a sample sees its last key.
    out: Tensor = flash_attn_varlen_func(query, key, value, *_ends(segments), softmax_scale=scaling, causal=True)
    return out


def _torch_varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # A window without end to the left and none to the right is causal, and begins at the end of each sample.
    options = {"scale": scaling, "window_size": (-1, 0), **_takes_gqa(varlen_attn)}
    out = varlen_attn(query, key, value, *_ends(segments), **options)
    assert isinstance(out, Tensor)
    return out


def _ends(segments: Segments) -> tuple[Tensor, Tensor, int, int]:
    return segments.ends_S, segments.seen_ends_S, segments.longest, segments.longest_seen


@cache
def _takes_gqa(kernel: Callable[..., Any]) -> dict[str, Any]:
    """Before torch 2.12 it takes fewer KV heads without being asked."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}


def _by_stretches(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    """`[1, N, H, D]`."""
    queries = torch.split(query.squeeze(0), [each.num_rows * each.num_own for each in segments.stretches], 1)
    keys, values = (torch.split(each.squeeze(0), segments.parts, 1) for each in (key, value))
    outs = []
    for stretch, query_HND in zip(segments.stretches, queries, strict=True):
        mask = segments.mask(stretch, query)
        out_RHLD = nn.functional.scaled_dot_product_attention(
            query_HND.reshape(len(query_HND), stretch.num_rows, stretch.num_own, -1).transpose(0, 1),
            stretch.keys(keys),
            stretch.keys(values),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        outs.append(out_RHLD.transpose(1, 2).flatten(0, 1))
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[None]
