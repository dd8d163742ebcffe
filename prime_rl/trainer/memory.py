"""The memory of a pass, from the trainer's own model, head and losses on tensors without memory.

`Meter` counts the bytes that are alive while that code runs, on ranks that are not there. The layers of a model are
alike, so every figure is a straight line over their number: two passes of a few layers give it for all of them, in
seconds for a model of any size. A model whose layers differ is measured as a whole.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # noqa: F401  # collectives of tensors without memory
import torch.testing._internal.distributed.fake_pg  # noqa: F401
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from prime_rl.configs.base import LoRAConfig
from prime_rl.configs.losses import AipoLossConfig
from prime_rl.configs.system import SHAPES
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.contract.types import TOKEN_BYTES, MicroBatch
from prime_rl.lora import linear
from prime_rl.lora.linear import BatchedPlan, GroupedPlan
from prime_rl.trainer import loss
from prime_rl.trainer import model as policy_model
from prime_rl.trainer.fair_queue import LOSS_TOKEN, MOST_SEEN
from prime_rl.trainer.model import PolicyModel, adapt_model, train_whole
from prime_rl.trainer.step import forward_backward

# Float32 numbers that Adam keeps for each trained weight.
MOMENTS = 2
# Of a whole model that is trained the trainer keeps in host memory: the base, the newest snapshot, and for a checkpoint
# the moments. On a CPU that is the memory of the passes too.
HOST_COPIES = 2 + MOMENTS
# With rows in a pass: measuring more takes minutes, and differs by little.
MOST_MEASURED_RUNS = 64
# Of rows that begin alike: each is calls of attention of its own.
MOST_BUNDLES = 64
# Blocks that are used again leave holes (`utils.runtime`): of what is kept for backward, so much more, where a pass
# gives them back from time to time, and where it does not. Measured.
HOLES_GIVEN_BACK, HOLES_KEPT = 0.15, 0.27
# The layers that are measured; more of a sharded model, as only from the third on all that overlaps does.
FEW_LAYERS, FEW_SHARDED_LAYERS = 2, 3


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages of the tensors that operations return; each counts once, until the last tensor on it goes.

    Attributes:
        alive: bytes now.
        peak: most bytes since the start, or since `reset_peak`.
        on_host: bytes that lie elsewhere, in the memory of the host; they do not count as alive.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = 0
        self.peak = 0
        self.on_host = 0
        self._is_host = False
        self._seen: weakref.WeakKeyDictionary[torch.UntypedStorage, _Size] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # more than half of all calls, and each is slow when a mode is asked
        if DTensor in types:
            return NotImplemented  # it comes again, as an operation on the part of this rank
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # Numbers that code makes on the side are real tensors, and small.
            if isinstance(leaf, FakeTensor):
                self._add(leaf)
        self.peak = max(self.peak, self.alive)
        return result

    def reset_peak(self) -> None:
        """Begin a new peak from what is alive."""
        self.peak = self.alive

    def copy_on_host(self, tensor: Tensor) -> Tensor:
        """As large as `tensor`, in the memory of the host."""
        self._is_host = True
        try:
            return torch.empty_like(tensor)
        finally:
            self._is_host = False

    def resized(self, storage: torch.UntypedStorage) -> None:
        """`storage` has another size now: sharded weights come and go so."""
        if size := self._seen.get(storage):
            self.alive += storage.nbytes() - size.num_bytes
            size.num_bytes = storage.nbytes()
            self.peak = max(self.peak, self.alive)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        size = self._seen[storage] = _Size(storage.nbytes(), self._is_host)
        self._count(size, size.num_bytes)
        weakref.finalize(storage, self._remove, size)

    def _remove(self, size: _Size) -> None:
        self._count(size, -size.num_bytes)

    def _count(self, size: _Size, num_bytes: int) -> None:
        if size.is_on_host:
            self.on_host += num_bytes
        else:
            self.alive += num_bytes


@dataclass
class _Size:
    num_bytes: int
    is_on_host: bool


@contextmanager
def metered() -> Iterator[Meter]:
    """Inside, tensors have shapes and types and no memory, and the meter counts them."""
    meter = Meter()
    storage_class: Any = torch.UntypedStorage
    resize = storage_class.resize_

    def resize_and_tell(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        resized = resize(storage, num_bytes)
        meter.resized(storage)
        return resized

    storage_class.resize_ = resize_and_tell
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), meter:
            yield meter
    finally:
        storage_class.resize_ = resize


@contextmanager
def mesh_of_ranks(num_ranks: int) -> Iterator[DeviceMesh]:
    """A mesh of `num_ranks`. In a trainer it is of its own group, which must have as many ranks: then a collective."""
    is_alone = not dist.is_initialized()
    if is_alone:
        dist.init_process_group("fake", rank=0, world_size=num_ranks, store=HashStore())
    try:
        yield init_device_mesh("cpu", (num_ranks,))
    finally:
        if is_alone:
            dist.destroy_process_group()


class UnknownModel(ValueError):
    """No such shape, folder or model; the message is one line with the names that exist."""


def model_config(name: str) -> PretrainedConfig:
    """The config of a model folder, of a shape by name, or of a model id that was downloaded. Raises UnknownModel."""
    is_folder = Path(name).is_dir()
    if not is_folder and (shape := SHAPES.get(name.lower())) is not None:
        # No row is longer than the model's positions; how many it has costs nothing.
        return AutoConfig.for_model(**shape, max_position_embeddings=131_072)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if is_folder:
            raise UnknownModel(f"{name}: no readable config.json: {' '.join(str(error).split())}") from error
        raise UnknownModel(f"{name} not found: name a model folder, or one of {', '.join(SHAPES)}") from error
    return config


@dataclass(frozen=True)
class Setting:
    """The question: a model, what is trained of it, and the passes.

    Attributes:
        dtype: what the model computes in; frozen weights are in it too.
        lora: the adapters; None: all weights are trained.
        tokens: token positions of a pass: as many rows of `seq_len` as fit, at least one.
        checkpoints: whether layers are computed again in backward.
        offloads: whether they keep what they need for that in the memory of the host, apart from the device's.
        packs: whether rows lie end to end.
        num_ranks: GPUs that the model is sharded over.
        host_copies: copies of all trained weights in the same memory.
        reuses_blocks: whether memory is a heap with holes: on a CPU.
        lean_mlps: whether gated MLPs are computed again, where layers are not.
        shares: whether packed rows have as much in common as those of a pass may have; else nothing.
    """

    model: PretrainedConfig
    dtype: torch.dtype
    lora: LoRAConfig | None
    num_runs: int
    seq_len: int
    tokens: int
    checkpoints: bool
    packs: bool = False
    offloads: bool = False
    num_ranks: int = 1
    host_copies: int = 0
    reuses_blocks: bool = False
    lean_mlps: bool = False
    shares: bool = True

    @property
    def num_rows(self) -> int:
        """Rows of a pass."""
        return max(1, self.tokens // self.seq_len)

    @property
    def row_tokens(self) -> int:
        """Tokens of each row, so that all rows together have `tokens`."""
        return self.tokens // self.num_rows

    @property
    def modes(self) -> dict[str, bool]:
        """The modes of `adapt_model` and `train_whole`, by the names of their arguments."""
        return {"checkpoints": self.checkpoints, "offloads": self.offloads, "packs": self.packs}


def setting_of(trainer: TrainerConfig, device_type: str, num_ranks: int) -> Setting:
    """Of the trainer's largest pass on devices of type "cuda" or "cpu". Raises UnknownModel."""
    model = trainer.model
    return Setting(
        model=model_config(model.name),
        dtype=getattr(torch, model.dtype_on(device_type)),
        lora=model.lora,
        num_runs=trainer.num_slots,
        seq_len=trainer.seq_len,
        tokens=max(trainer.seq_len, trainer.micro_batch_tokens),
        checkpoints=model.checkpoints_on(device_type),
        packs=model.packs,
        offloads=model.activation_offload and device_type == "cuda",
        num_ranks=num_ranks,
        host_copies=HOST_COPIES if device_type == "cpu" and model.lora is None else 0,
        reuses_blocks=device_type == "cpu",
        lean_mlps=model.lean_mlps,
    )


@dataclass(frozen=True)
class PassMemory:
    """Bytes on one rank.

    Attributes:
        weights: the model; of several ranks, this one's part. Of a frozen model also the layers that a rank puts
            together in a pass; of one that is trained, the copies in host memory where that is the device's.
        adapters: weights and gradients of all slots, in float32; of a model that is trained, its gradients.
        optimizer: the moments of what is trained.
        activations: what backward needs, when the layers' forward ends, with the holes between.
        head: the most that log-probabilities and entropies take then.
        work: what backward takes beyond all that; of a model that is trained, with the layers that are put together.
        offloaded: what backward needs of which the host keeps a copy in the device's place: no part of the peak.
    """

    weights: float
    adapters: float
    optimizer: float
    activations: float
    head: float
    work: float
    offloaded: float = 0.0

    @property
    def peak(self) -> float:
        """The most that the device holds at one time."""
        return float(sum(astuple(self)) - self.offloaded)


@dataclass(frozen=True)
class _Levels:
    """Bytes, each a straight line over the layers of a model (but not the largest of them: that one may change).

    Attributes:
        at_head: when the head begins, beyond what was there before the pass; so are the next four.
        forward: the most before that.
        in_head: the most until the head's forward ends.
        backward: the most from then until the embedding's backward begins.
        last: the most from then on: gradients of what is around the layers.
        offloaded: what the host keeps when the head begins.
    """

    weights: float
    adapters: float
    optimizer: float
    at_head: float
    forward: float
    in_head: float
    backward: float
    last: float
    offloaded: float

    def memory(self) -> PassMemory:
        peak = max(self.forward, self.in_head, self.backward, self.last)
        head = self.in_head - self.at_head
        of_runs = self.weights, self.adapters, self.optimizer
        return PassMemory(*of_runs, self.at_head, head, peak - self.in_head, self.offloaded)

    def plus(self, other: _Levels, times: float) -> _Levels:
        """`times` the other added to this one."""
        return _Levels(*(mine + times * its for mine, its in zip(astuple(self), astuple(other), strict=True)))


def predict(setting: Setting) -> PassMemory:
    """The memory of a pass of the default loss: the most that one of so many positions takes."""
    # A run without a row costs its own bytes alone.
    num_runs = min(setting.num_runs, setting.num_rows, MOST_MEASURED_RUNS)
    found = _predict(replace(setting, num_runs=num_runs))
    times = setting.num_runs / num_runs
    gives_back = setting.checkpoints or setting.lean_mlps or setting.lora is None
    holes = HOLES_GIVEN_BACK if gives_back else HOLES_KEPT
    activations = found.activations * (1 + holes * setting.reuses_blocks)
    return replace(found, adapters=times * found.adapters, optimizer=times * found.optimizer, activations=activations)


def _predict(setting: Setting) -> PassMemory:
    num_layers = setting.model.num_hidden_layers
    are_alike = len(set(getattr(setting.model, "layer_types", None) or ())) <= 1
    few = FEW_LAYERS if setting.lora else FEW_SHARDED_LAYERS
    low, high = (few, few + 1) if are_alike and num_layers > few + 1 else (1, num_layers)
    small, large = _levels(setting, low), _levels(setting, high)
    layer = large.plus(small, -1.0)  # of one layer, where the difference is one
    whole = small.plus(layer, (num_layers - low) / max(1, high - low)).memory()
    if setting.lora is None or setting.num_ranks == 1:
        return whole
    # A part of every weight, two whole layers (the one that works and the next), and what is around the layers.
    weights, of_layer = whole.weights, layer.weights / max(1, high - low)
    weights = weights / setting.num_ranks + 2 * of_layer + (weights - num_layers * of_layer)
    return replace(whole, weights=weights)


def measure(setting: Setting, num_layers: int) -> PassMemory:
    """On one rank; a model that is trained as it is sharded, a frozen one whole."""
    return _levels(setting, num_layers).memory()


# By what was measured: searches for what fits come back to the same passes.
_measured: dict[str, _Levels] = {}


def _levels(setting: Setting, num_layers: int) -> _Levels:
    config = copy.deepcopy(setting.model)
    config.num_hidden_layers = num_layers
    asked = f"{config.to_json_string(use_diff=False)}{replace(setting, model=None)}"
    if asked not in _measured:
        measured = _levels_whole if setting.lora is None else _levels_adapters
        _measured[asked] = measured(setting, config)
    return _measured[asked]


def _levels_adapters(setting: Setting, config: PretrainedConfig) -> _Levels:
    assert setting.lora is not None
    with metered() as meter:
        base = AutoModelForCausalLM.from_config(config, dtype=setting.dtype)
        weights = meter.alive
        model = adapt_model(base, setting.lora, setting.num_runs, lean_mlps=setting.lean_mlps, **setting.modes)
        adapters = meter.alive - weights
        stages = _run_pass(setting, meter, model, model.adapters())
        return stages.levels(weights, 2 * adapters, MOMENTS * adapters)


def _levels_whole(setting: Setting, config: PretrainedConfig) -> _Levels:
    with mesh_of_ranks(setting.num_ranks) as mesh, metered() as meter:
        base = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model = train_whole(base, mesh, setting.dtype, **setting.modes)
        weights = meter.alive
        stages = _run_pass(setting, meter, model, list(base.parameters()))
        return stages.levels((1 + setting.host_copies) * weights, weights, MOMENTS * weights)


def _run_pass(setting: Setting, meter: Meter, model: PolicyModel, trained: list[nn.Parameter]) -> _Stages:
    """A pass that is not the first of its batch: the gradients of a whole model are there, those of adapters beside."""
    if setting.lora is None:
        for leaf in trained:
            leaf.grad = torch.zeros_like(leaf)
    stages = _Stages(meter, model)
    batch = micro_batch(setting)
    with _few_chunks(), _host_apart(meter), _uneven_groups(setting):
        forward_backward(model, batch, [AipoLossConfig()] * len(batch.run_idxs), torch.device("cpu"))
    return stages


@contextmanager
def _few_chunks() -> Iterator[None]:
    """Inside, the head works on its first two chunks and the last: the hundreds between are alike, and take as long."""
    module: Any = loss
    every = module.head_chunks

    def few(num_tokens: int, num_vocabulary: int) -> list[slice]:
        chunks: list[slice] = every(num_tokens, num_vocabulary)
        return chunks[:2] + chunks[2:][-1:]

    module.head_chunks = few
    try:
        yield
    finally:
        module.head_chunks = every


@contextmanager
def _uneven_groups(setting: Setting) -> Iterator[None]:
    """Inside, the products of packed rows go through one kernel where a GPU has it, with a table for each product."""
    rank = setting.lora.rank if setting.lora else 0
    has_kernel = setting.packs and setting.dtype == torch.bfloat16 and rank and rank % 8 == 0
    module: Any = linear
    make = module.make_plan
    if has_kernel:
        module.make_plan = lambda groups, *_, **__: GroupedPlan(groups) if len(groups) > 1 else BatchedPlan(groups)
    try:
        yield
    finally:
        module.make_plan = make


@contextmanager
def _host_apart(meter: Meter) -> Iterator[None]:
    """Inside, what layers offload is copied to the memory of the host and back, as it is on a GPU."""
    module: Any = policy_model
    on_cpu = module.save_on_cpu
    # Without memory all devices are the same one, so nothing would be copied.
    module.save_on_cpu = lambda pin_memory: saved_tensors_hooks(meter.copy_on_host, torch.empty_like)
    try:
        yield
    finally:
        module.save_on_cpu = on_cpu


class _Stages:
    """The most that is alive in each stage of a pass, and what is alive when the head begins."""

    def __init__(self, meter: Meter, model: PolicyModel) -> None:
        self._meter = meter
        self._start = meter.alive
        self._at_head = self._offloaded = 0
        self._peaks: list[int] = []
        meter.reset_peak()
        model.head.register_forward_pre_hook(self._head_begins)
        model.head.register_forward_hook(lambda *_: self._stage_ends())
        model.module.get_input_embeddings().register_forward_hook(self._embedded)  # type: ignore[operator]

    def _stage_ends(self) -> None:
        self._peaks.append(self._meter.peak - self._start)
        self._meter.reset_peak()

    def _head_begins(self, *_: Any) -> None:
        self._at_head = self._meter.alive - self._start
        self._offloaded = self._meter.on_host
        self._stage_ends()

    def _embedded(self, module: nn.Module, inputs: Any, hidden_RTH: Tensor) -> None:
        if hidden_RTH.requires_grad:
            hidden_RTH.register_hook(lambda _: self._stage_ends())  # type: ignore[no-untyped-call]

    def levels(self, weights: int, adapters: int, optimizer: int) -> _Levels:
        self._stage_ends()
        forward, in_head, backward, *last = self._peaks
        most = (forward, in_head, backward, max(last, default=backward))
        return _Levels(weights, adapters, optimizer, self._at_head, *most, self._offloaded)


def micro_batch(setting: Setting) -> MicroBatch:
    """Rows of the runs in turn. The second half of each is a completion, or they share what they can.

    None has soft targets: those of a token are 240 bytes, and its tables in the head are as wide as the vocabulary.
    """
    num_rows, num_tokens = setting.num_rows, setting.row_tokens
    plain = [(num_tokens + 1, 0, num_tokens - num_tokens // 2)] * num_rows
    rows = _sharing_rows(setting) if setting.packs and setting.shares else plain
    return MicroBatch(
        run_idxs=[row * setting.num_runs // len(rows) for row in range(len(rows))],
        token_ids=[bytes(tokens * TOKEN_BYTES) for tokens, _, _ in rows],
        loss_mask=[bytes(tokens - loss) + LOSS_TOKEN * loss for tokens, _, loss in rows],
        logprobs=[bytes(tokens * TOKEN_BYTES) for tokens, _, _ in rows],
        advantages=[1.0] * len(rows),
        temperatures=[1.0] * len(rows),
        loss_scales=[1.0] * len(rows),
        num_tokens=max(tokens for tokens, _, _ in rows),
        shared=[shared for _, shared, _ in rows],
    )


def _sharing_rows(setting: Setting) -> list[tuple[int, int, int]]:
    """Tokens, shared positions and loss tokens of rows that see MOST_SEEN times what is computed.

    That is four rows a bundle, which share as much as two of them have of their own. Every position that is computed
    predicts a loss token.
    """
    assert MOST_SEEN == 2
    num_bundles = max(setting.num_runs, min(setting.num_rows, MOST_BUNDLES))
    computed = setting.tokens // num_bundles
    own = computed // 6
    shared = computed - 4 * own
    first = (shared + own + 1, 0, shared + own)
    others = [(shared + own + 1, shared, own)] * 3
    return [first, *(others if own else ())] * num_bundles
