"""The model of the embedded engine: loading it, one forward over rows of many adapters, its weights, its KV cache.

Works for every causal LM of transformers whose cache is made of keys and values only; models with a recurrent state are
refused when they are loaded. Which rows run together is decided elsewhere (`batch`).

All rows of a batch share one write column of the cache, so a decode step is one forward for all of them. Rows are
aligned at the right: a row of n tokens fills the last n columns and the columns before them are masked. The next token
of every row then goes into the same column (a plain slice, no gather), distances between columns are distances between
tokens (sliding windows stay right), and transformers' own masks for left-padded batches apply. When the batch changes
or its columns are full (`compose`), rows are copied together and columns that no row needs are cut off.

What was computed for a sequence is kept in blocks of tokens (`PrefixCache`). A prompt that begins with them is computed
from where they end.

transformers repeats the KV heads for every masked call, which copies the whole cache once a step and layer. With one
query a row, the queries of a group can stand where the tokens of a query stand: the same numbers, no copy
(`grouped_attention`).

Dimensions: R rows, P longest prompt, H KV heads, C columns allocated, T columns in use, Q new columns, D head size, V
vocabulary, K likeliest tokens; in the attention also G query heads of one KV head; of blocks N tokens, L heads of the
keys and values of all layers.
"""

from __future__ import annotations

import contextlib
import inspect
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.guard import WEIGHTS_FILE, ApiError, check_fit, readable, weights_label
from prime_rl.lora.adapter_state import check_finite, load_tensors, shapes_of
from prime_rl.lora.linear import AdapterRouting, MultiLoRALinear, apply_lora_to_model, sent, take_share
from prime_rl.lora.parts import fuse_mlps, fuse_norms, head_chunks, share_inputs, use_rotary
from prime_rl.transfer import TransferError, WeightReceiver
from prime_rl.utils.runtime import StartError

# Of the memory that is free after loading: the cache is copied when the batch changes, and others live here too.
CACHE_SHARE = 0.25
# Free columns after a copy: a copy costs about a fifth of a step of a small model, so once in 64 steps is nothing.
SPARE_COLUMNS = 64
# Tokens of a block, as in vLLM: a beginning is shared in whole blocks.
BLOCK = 16
ATTENTION = "prl_grouped"
# Layer kinds whose whole memory is keys and values, masked by column.
_KV_LAYERS = frozenset({"full_attention", "sliding_attention"})
_ADAPTERS = (".lora_A.", ".lora_B.")


class ColumnLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, `[R, H, C, D]`, of which `num_columns` columns are in use."""

    is_croppable = False
    is_initialized: bool

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None, num_columns: int = 0) -> None:
        super().__init__()
        self.keys: Any = keys
        self.values: Any = values
        self.num_columns = num_columns
        self.is_initialized = keys is not None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append Q columns `[R, H, Q, D]`; returns all columns in use, as views.

        The columns of a prompt are kept as they come: they are copied when its row joins the others.
        """
        start, self.num_columns = self.num_columns, self.num_columns + key_states.shape[2]
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
        else:
            self.keys[:, :, start : self.num_columns] = key_states
            self.values[:, :, start : self.num_columns] = value_states
        return self.keys[:, :, : self.num_columns], self.values[:, :, : self.num_columns]

    def get_seq_length(self) -> int:
        """Columns in use, under the name that transformers calls."""
        return self.num_columns


def new_cache() -> Cache:
    """An empty cache; give it to a transformers model as `past_key_values`."""
    return Cache(layer_class_to_replicate=ColumnLayer)


def compose(rows: Sequence[tuple[Cache, int]], num_columns: int) -> Cache:
    """A new cache whose rows are the given rows of other caches, with the last `num_columns` columns of each.

    `num_columns` must be the length of the longest row at least; what is cut off is lost.
    """
    caches = {id(cache): cache for cache, _ in rows}.values()
    device = rows[0][0].layers[0].keys.device
    # Of each old cache: rows of it, and where they go.
    moves = [
        torch.tensor([(row, dest) for dest, (cache, row) in enumerate(rows) if cache is each], device=device).unbind(1)
        for each in caches
    ]

    def moved(olds: Sequence[Tensor], used: Sequence[int]) -> Tensor:
        _, H, _, D = olds[0].shape
        # Zeros and not garbage: a masked column is multiplied by zero, and zero times NaN is NaN.
        new_RHCD = olds[0].new_zeros((len(rows), H, num_columns + SPARE_COLUMNS, D))
        for old_RHCD, end, (source_R, dest_R) in zip(olds, used, moves, strict=True):
            width = min(num_columns, end)
            new_RHCD[dest_R, :, num_columns - width : num_columns] = old_RHCD[source_R, :, end - width : end]
        return new_RHCD

    new = new_cache()
    for olds in zip(*(cache.layers for cache in caches), strict=True):
        used = [old.num_columns for old in olds]
        keys, values = moved([old.keys for old in olds], used), moved([old.values for old in olds], used)
        new.layers.append(ColumnLayer(keys, values, num_columns))
    return new


def columns_of(cache: Cache, row: int, start: int, stop: int) -> Tensor:
    """The keys and values of some columns of a row, `[L, N, D]`: a copy. All layers must have heads of one size."""
    tensors = [each for layer in cache.layers for each in (layer.keys, layer.values)]
    return torch.cat([each[row, :, start:stop] for each in tensors])


@dataclass(frozen=True)
class _Block:
    values_LND: Tensor
    slot: int | None
    run_id: str


class PrefixCache:
    """Keys and values that later sequences may begin with, in blocks of BLOCK tokens.

    The key of a block is a digest of its adapter and of all tokens up to its end, so only a sequence that begins with
    the same tokens, for the same adapter, finds it. For a new block the run that has the most (among equals its own)
    loses the one that was used the longest ago, and of a sequence the last before the first. So no run gets below an
    equal part because of others.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: dict[bytes, _Block] = {}
        self._by_use: dict[str, OrderedDict[bytes, None]] = {}  # of each run, the one used the longest ago first

    def __len__(self) -> int:
        return len(self._blocks)

    def num_known(self, keys: Sequence[bytes]) -> int:
        """The number of `keys` that are here, from the first to the first that is not."""
        return next((at for at, key in enumerate(keys) if key not in self._blocks), len(keys))

    def next_missing(self, keys: Sequence[bytes]) -> bytes | None:
        """The first of `keys` that is not here and could be."""
        return next((key for key in keys if key not in self._blocks), None) if self._max_blocks else None

    def find(self, keys: Sequence[bytes]) -> list[Tensor]:
        """The blocks of `num_known(keys)`, `[L, BLOCK, D]` each."""
        known = keys[: self.num_known(keys)]
        self._use(known)
        return [self._blocks[key].values_LND for key in known]

    def keep(self, keys: Sequence[bytes], read: Callable[[int, int], Tensor], *, slot: int | None, run_id: str) -> None:
        """Add the blocks of a sequence that are missing; `read` returns its tokens from one to before another."""
        if self.next_missing(keys) is None:
            return
        own, known = set(keys), self.num_known(keys)
        values_LND = read(known * BLOCK, len(keys) * BLOCK)
        for key, block_LND in zip(keys[known:], values_LND.chunk(len(keys) - known, dim=1), strict=True):
            if key in self._blocks:
                continue
            if len(self._blocks) >= self._max_blocks:
                most = max(self._by_use, key=lambda each: (len(self._by_use[each]), each == run_id))
                if (oldest := next(iter(self._by_use[most]))) in own:  # the sequence alone is too long for its part
                    break
                self._remove(oldest)
            self._blocks[key] = _Block(block_LND.clone(), slot, run_id)
            self._by_use.setdefault(run_id, OrderedDict())[key] = None
        self._use(keys)

    def drop(self, slot: int) -> None:
        """Forget what was computed with the adapter in `slot`."""
        for key in [key for key, block in self._blocks.items() if block.slot == slot]:
            self._remove(key)

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self._by_use.clear()

    def shrink(self) -> None:
        """Forget everything, and have half of the room from now on."""
        self.clear()
        self._max_blocks //= 2

    def _use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if (block := self._blocks.get(key)) is not None:
                self._by_use[block.run_id].move_to_end(key)

    def _remove(self, key: bytes) -> None:
        run_id = self._blocks.pop(key).run_id
        del self._by_use[run_id][key]
        if not self._by_use[run_id]:
            del self._by_use[run_id]


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Same arguments and result as transformers' sdpa function: query `[R, HG, Q, D]` -> `[R, Q, HG, D]`."""
    num_groups = getattr(module, "num_key_value_groups", 1)
    plain = query.shape[2] == 1 and num_groups > 1 and kwargs.get("position_bias") is None
    if not plain or (attention_mask is not None and attention_mask.shape[1] != 1):
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return result
    query_RHGD = query.reshape(query.shape[0], key.shape[1], num_groups, query.shape[3])
    mask_R1GT = None if attention_mask is None else attention_mask.expand(-1, -1, num_groups, -1)
    out_RHGD = F.scaled_dot_product_attention(query_RHGD, key, value, attn_mask=mask_R1GT, scale=scaling)
    return out_RHGD.flatten(1, 2)[:, None], None


class WholeWeights:
    """The parameters of `model`, and other weights for them.

    Those are read and checked first, then put in place at once. When it is safe to change them is the caller's
    business.

    Each has the name that a model folder has for it, whatever adapters were put around the layers. `shapes` are those
    that a weight file must have; a tied weight is there once.
    """

    def __init__(self, model: nn.Module, config: InferenceConfig) -> None:
        self._parameters = {
            name.replace(".base_layer.", "."): parameter
            for name, parameter in model.named_parameters()
            if not any(part in name for part in _ADAPTERS)
        }
        self.shapes = shapes_of(self._parameters)
        self._config = config
        self._receiver: WeightReceiver | None = None
        self._base: dict[str, Tensor] | None = None  # made when it is first needed: adapters alone never do

    def read(self, folder: Path) -> dict[str, Tensor]:
        """The weights that were published in `folder`: from its file, or from the trainer's memory.

        Raises ApiError (400) when they do not fit the model. Changes nothing.
        """
        if self._config.broadcast.type == "nccl":
            name = weights_label(self._config.output_dir.resolve(), folder)
            tensors = self._received(name)
        else:
            name = str(folder / WEIGHTS_FILE)
            with readable(folder / WEIGHTS_FILE):
                tensors = load_tensors(folder / WEIGHTS_FILE, mapped=True)
        check_fit(name, shapes_of(tensors), self.shapes)
        try:
            check_finite(tensors)
        except ValueError as error:
            raise ApiError(422, f"The weights were not changed: {error}", param="weight_dir") from error
        return tensors

    def _received(self, label: str) -> dict[str, Tensor]:
        if self._receiver is None:
            source, device = self._config.broadcast, next(iter(self._parameters.values())).device
            self._receiver = WeightReceiver(source.host, source.port, timeout_s=source.timeout_s, device=device)
        try:
            return self._receiver.receive(label, ticket=uuid.uuid4().hex)
        except TransferError as error:
            raise ApiError(400, f"The weights stay as they are: {error}", param="weight_dir") from error

    @torch.no_grad()
    def apply(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Put what `read` returned in place; None: the weights that the model was loaded with.

        No forward may run meanwhile.
        """
        if self._base is None:
            if tensors is None:
                return
            self._base = {name: parameter.to("cpu", copy=True) for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            parameter.copy_((tensors or self._base)[name])


class Scored(NamedTuple):
    """Of tokens `[R, P]`, on the host: log-probability and rank (1: the likeliest) of each, the K likeliest there."""

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@dataclass
class Served:
    """A loaded model with room for adapters. Not thread-safe: one thread owns it.

    Attributes:
        layers: those that take adapters, by name; empty when adapters are switched off.
        weights: its own.
        eos_ids: tokens that end a sequence.
        cache_tokens: how many tokens of all rows together, padding included, the KV cache may hold.
        prefix_blocks: how many blocks of tokens may be kept beside it.
        kv_heads: H of the keys and of the values of each layer.
    """

    model: PreTrainedModel
    layers: Mapping[str, MultiLoRALinear]
    routing: AdapterRouting
    weights: WholeWeights
    eos_ids: frozenset[int]
    cache_tokens: int = 0
    prefix_blocks: int = 0
    kv_heads: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.device: torch.device = self.model.device
        self.vocab_size: int = self.model.get_input_embeddings().num_embeddings
        # V, which a model may have padded beyond its tokens.
        self._head: nn.Module = self.model.get_output_embeddings()
        self.num_logits: int = self._head.weight.shape[0]
        self._accepted = inspect.signature(self.model.forward).parameters

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int | None],
        kept: Sequence[Sequence[Tensor]] = (),
        num_new: int | None = None,
        read: Callable[[Tensor], object] | None = None,
    ) -> Cache:
        """The cache of whole prompts, padded at the left. They may be empty: there is one column at least.

        Args:
            kept: blocks of tokens that each prompt begins with.
            num_new: the last tokens of each prompt that are computed, at least those that `kept` lacks; None: all.
            read: as in `forward`.
        """
        longest = max(1, *map(len, prompts))
        num_old = 0 if num_new is None else longest - num_new
        cache = self._filled(kept, list(map(len, prompts)), num_old, longest) if num_old else new_cache()
        if num_old == longest:
            return cache
        ids_RP = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask_RP = torch.zeros((len(prompts), longest), dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids_RP[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
            mask_RP[row, longest - len(prompt) :] = True
        positions_RP = (mask_RP.cumsum(dim=-1) - 1).clamp(min=0)
        self.forward(ids_RP[:, num_old:], mask_RP, positions_RP[:, num_old:], cache, slots, read)
        return cache

    def _filled(self, kept: Sequence[Sequence[Tensor]], lengths: Sequence[int], num_old: int, longest: int) -> Cache:
        """A cache with room for `longest` columns, of which the first `num_old` are in use."""
        some_LND = next(block for blocks in kept for block in blocks)
        all_LRCD = some_LND.new_zeros((len(some_LND), len(kept), longest, some_LND.shape[2]))
        for row, (blocks, length) in enumerate(zip(kept, lengths, strict=True)):
            if (num := length - longest + num_old) > 0:
                all_LRCD[:, row, num_old - num : num_old] = torch.cat(list(blocks), dim=1)[:, :num]
        tensors = [each_HRCD.transpose(0, 1) for each_HRCD in all_LRCD.split_with_sizes(list(self.kv_heads))]
        cache = new_cache()
        cache.layers = [ColumnLayer(*pair, num_old) for pair in zip(tensors[::2], tensors[1::2], strict=True)]
        return cache

    def forward(
        self,
        ids_RP: Tensor,
        mask_RT: Tensor,
        positions_RP: Tensor,
        cache: Cache,
        slots: Sequence[int | None],
        read: Callable[[Tensor], object] | None = None,
    ) -> Tensor:
        """The logits `[R, V]` after the new tokens of every row.

        Given are the tokens, the columns that the row may see, the positions (= tokens before each), and the row's
        adapter. The cache then has the tokens too. `read` gets what the head reads of all new tokens, for `score`.
        """
        self.routing.set_rows(slots)
        optional = {"position_ids": positions_RP.to(self.device), "logits_to_keep": 0 if read else 1}
        with torch.inference_mode(), _reading(self._head, read):
            out = self.model(
                input_ids=ids_RP.to(self.device),
                attention_mask=mask_RT.to(self.device),
                past_key_values=cache,
                use_cache=True,
                **{name: value for name, value in optional.items() if name in self._accepted},
            )
        logits_RV: Tensor = out.logits[:, -1]
        return logits_RV

    def score(self, read_RPH: Tensor, targets_RP: Tensor, num_top: int) -> Scored:
        """Of each token in `targets_RP` what the model says behind those before it. A few tables exist at one time."""
        parts, targets_RP = [], sent(targets_RP, self.device)
        for chunk in head_chunks(targets_RP.shape[1], len(targets_RP) * self.num_logits):
            logprobs_RPV = torch.log_softmax(self._head.forward(read_RPH[:, chunk]).float(), dim=-1)
            given_RP1 = logprobs_RPV.gather(2, targets_RP[:, chunk, None])
            top = logprobs_RPV.topk(min(num_top, self.num_logits), dim=-1)
            parts.append((given_RP1[..., 0], (logprobs_RPV >= given_RP1).sum(-1), top.indices, top.values))
        return Scored(*(torch.cat(each, dim=1).cpu() for each in zip(*parts, strict=True)))


@contextlib.contextmanager
def _reading(head: nn.Module, read: Callable[[Tensor], object] | None) -> Iterator[None]:
    """Inside, `read` gets what `head` reads, which makes the logits of the last token alone."""
    if read is None:
        yield
        return

    def last_alone(head: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        read(inputs[0])
        return inputs[0][:, -1:]

    with head.register_forward_pre_hook(last_alone):
        yield


def load_model(config: InferenceConfig) -> Served:
    """Load the base model of `config` and put empty adapters into it. Raises StartError or OSError."""
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if config.device == "auto" else config.device)
    model = AutoModelForCausalLM.from_pretrained(
        config.model.name, dtype=getattr(torch, config.model.dtype_on(device.type)), trust_remote_code=False
    )
    _refuse_stateful(config.model.name, model)
    if model.config._attn_implementation == "sdpa":  # other kinds are left as they are
        AttentionInterface.register(ATTENTION, grouped_attention)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        model.set_attn_implementation(ATTENTION)
    share = take_share(config.gpu_share) if device.type == "cuda" else 0.0
    model.to(device).eval()
    routing = AdapterRouting(config.max_loras, is_served=True)
    layers: dict[str, MultiLoRALinear] = {}
    use_rotary(model)
    if (lora := config.model.lora) is not None:  # else all weights are trained, with the libraries' norms and MLPs
        fuse_norms(model)
        layers = apply_lora_to_model(model, lora.rank, config.max_loras, lora.target_modules, routing)
        share_inputs(model)
        fuse_mlps(model, keeps=False)
    model.requires_grad_(False)
    given = [getattr(each, "eos_token_id", None) for each in (model.generation_config, model.config)]
    eos_ids = frozenset(eos for value in given for eos in ([value] if isinstance(value, int) else value or []))
    served = Served(model, layers, routing, WholeWeights(model, config), eos_ids)
    of_one = [each for layer in served.prefill([[0]], [None]).layers for each in (layer.keys, layer.values)]
    token_bytes = sum(each.nbytes for each in of_one)
    free = share - torch.cuda.memory_allocated() if device.type == "cuda" else psutil.virtual_memory().available
    room = config.num_seqs_on(device.type) * config.model.max_model_len * token_bytes
    kept = config.embedded.prefix_bytes(free, room)
    if kept > free:
        found = f"found {kept / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free beside the model"
        raise StartError(f"embedded.prefix_cache_gb: {found}: lower it, or leave it to auto")
    if len({each.shape[3] for each in of_one}) == 1:
        served.kv_heads = [each.shape[1] for each in of_one]
        served.prefix_blocks = int(kept / (BLOCK * token_bytes))
    served.cache_tokens = max(0, int((free - kept) * CACHE_SHARE / token_bytes))
    return served


def _refuse_stateful(name: str, model: PreTrainedModel) -> None:
    kinds = set(getattr(model.config, "layer_types", None) or ()) - _KV_LAYERS
    if kinds or getattr(model, "_is_stateful", False):
        raise StartError(
            f"{name}: the embedded engine cannot serve a model with {', '.join(sorted(kinds)) or 'recurrent'} "
            'layers; use engine = "vllm"'
        )
