"""The trainer's own code on tensors that say they are on a GPU and have no memory: what mixes devices fails.

    python -m tests.traced_main LIBRARY SCENARIO...

LIBRARY is `no_gpu.cpp` as a shared library. A build of torch for the CPU has no kernels for a GPU, and needs none:
shapes, types and devices are those of the real operations. Prints JSON: for each of the scenarios its error, null
without, and which operations it came by. What asks the device for a number gets a half, or 1.

Not traced: CUDA streams and pinned memory (the copies of a whole model to the host), NCCL, and numbers of any kind.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast, get_args

if __name__ == "__main__":
    # Before torch, which looks for a GPU once.
    ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)

import msgspec
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from prime_rl.configs.base import LoRAConfig
from prime_rl.configs.losses import AipoLossConfig, LossConfig
from prime_rl.configs.orchestrator import OptimConfig
from prime_rl.configs.validate import TrainerLimits
from prime_rl.contract.types import TOKEN_BYTES, MicroBatch
from prime_rl.lora.linear import AdapterRouting
from prime_rl.trainer.checkpoint import AdapterSnapshot, AdapterSnapshots
from prime_rl.trainer.fair_queue import rows_of, to_micro_batch
from prime_rl.trainer.model import PolicyModel, _put_head, _set_up_attention, adapt_model
from prime_rl.trainer.optim import FlatWeights, RunOptimizer
from prime_rl.trainer.runs import MultiRunManager
from prime_rl.trainer.runs.sync import Channel, ReadyRun
from prime_rl.trainer.step import TrainStep, forward_backward
from prime_rl.trainer.world import World
from tests.trainer_support import VOCAB, sample, write_run

GPU = torch.device("cuda:0")
LORA = LoRAConfig(rank=16, alpha=32)
NUM_RUNS = 3
# Of each run; no two runs have the same number of tokens, and only some samples the same length.
LENGTHS = {0: [9, 9, 23], 1: [6], 2: [14, 17]}
CLIPPED = [{"type": kind, "old_logprobs": "trainer"} for kind in ("gspo", "dapo", "dr_grpo")]
LOSSES: list[dict[str, Any]] = [
    *({"type": kind} for kind in ("aipo", "tis", "icepop", "dppo", "mis", "gspo", "cispo", "dapo", "dr_grpo")),
    {"type": "tis", "level": "sequence"},
    {"type": "aipo", "kl_coef": 0.3},
    {"type": "dapo", "kl_coef": 0.3, "old_logprobs": "inference"},
    *CLIPPED,
]
OPTIMIZERS = get_args(OptimConfig.model_fields["type"].annotation)
# Those with code of their own: the others are torch's, one like the other.
USUAL = ("adamw", "sgd", "muon")
_loss_config: TypeAdapter[LossConfig] = TypeAdapter(LossConfig)


# Operations whose result has a shape, or is a number, that only the device knows.
ASKS = {"aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten._unique2", "aten.equal"}


class Recorder(TorchDispatchMode):
    """The names of the operations; a number that code takes from the device is a half, or 1.

    Attributes:
        waits: those for which the host would wait until the device has done all before, with their line.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten._pin_memory.default:  # there is no driver that could
            return args[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._look(func, args, kwargs or {})
        if any(tensor.is_cuda for tensor in tensors):
            self.operations.add(str(func.overloadpacket))
            # torch itself looks at its own operations only; one number may come from the host in all of them.
            elsewhere = [tuple(tensor.shape) for tensor in tensors if tensor.dim() and not tensor.is_cuda]
            assert func.namespace == "aten" or not elsewhere, f"{func}: on the CPU: {elsewhere}"
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.5 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))

    def _look(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        name = str(func.overloadpacket)
        if name == "aten._to_copy":
            to, source = torch.device(kwargs.get("device") or args[0].device), args[0].device
            waits = to.type != source.type and not kwargs.get("non_blocking")
        elif name == "aten.copy_":
            is_async = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            waits = args[0].device.type != args[1].device.type and not is_async
        else:
            waits = name in ASKS and args[0].is_cuda
        if waits:
            frames = [frame for frame in traceback.extract_stack() if "/prime_rl/" in frame.filename]
            self.waits.append(f"{name}: {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}")


def base_on_gpu(dtype: torch.dtype, num_layers: int = 1) -> Any:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    move_to_gpu(model)
    return model


def move_to_gpu(model: nn.Module) -> None:
    """As `model.to(GPU)`, which fails on tensors without memory. What is neither parameter nor buffer stays behind."""
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one, so that its id is not given away
    tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    for table in tables:
        for name, old in table.items():
            if old is None:
                continue
            if id(old) not in moved:
                new = torch.empty_like(old, device=GPU)
                moved[id(old)] = old, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
            table[name] = moved[id(old)][1]


def adapted(dtype: torch.dtype, *, packs: bool, offloads: bool = False, lora: LoRAConfig = LORA) -> PolicyModel:
    return adapt_model(base_on_gpu(dtype), lora, NUM_RUNS, checkpoints=True, offloads=offloads, packs=packs)


def micro_batch(seed: int = 0, *, shares: bool = True) -> MicroBatch:
    """With `shares` those of run 0 begin with the same tokens."""
    rng = random.Random(seed)
    prompts = {0: [rng.randrange(VOCAB) for _ in range(40)] if shares else []}
    rows = []
    for idx, lengths in LENGTHS.items():
        prompt = prompts.get(idx, [])
        many = [sample(rng, num_tokens=len(prompt) + num, prompt=prompt, advantage=0.7).columns() for num in lengths]
        rows += rows_of(idx, many)
    assert any(row.shared for row in rows) == shares
    return to_micro_batch(rows, base_pass=True)


def with_token_advantages(batch: MicroBatch) -> MicroBatch:
    """The same, with an advantage for each token of every second row."""
    columns = [b"" if at % 2 else bytes(TOKEN_BYTES * len(mask)) for at, mask in enumerate(batch.loss_mask)]
    return msgspec.structs.replace(batch, token_advantages=columns)


def run_passes(
    model: PolicyModel, losses: Sequence[dict[str, Any]] = LOSSES[-NUM_RUNS:], batch: MicroBatch | None = None
) -> None:
    """Passes in which every run has another loss."""
    batch = batch or micro_batch()
    configs = [_loss_config.validate_python(values) for values in losses]
    for some in batched(configs, NUM_RUNS):
        found = forward_backward(model, batch, [some[run_idx] for run_idx in batch.run_idxs], GPU)
        assert found is not None and found.losses.loss_R.device == found.entropy_RK.device == GPU
    assert all(leaf.grad is not None and leaf.grad.dtype == torch.float32 for leaf in model.adapters())
    assert {leaf.grad.device for leaf in model.adapters() if leaf.grad is not None} == {GPU}


def packed_bfloat16() -> None:
    run_passes(adapted(torch.bfloat16, packs=True), LOSSES)


def advantages_of_tokens() -> None:
    run_passes(adapted(torch.bfloat16, packs=True), LOSSES, with_token_advantages(micro_batch()))


def packed_bfloat16_of_an_odd_rank() -> None:
    run_passes(adapted(torch.bfloat16, packs=True, lora=LoRAConfig(rank=12)))


def offloaded() -> None:
    run_passes(adapted(torch.bfloat16, packs=True, offloads=True))


def packed_float32() -> None:
    run_passes(adapted(torch.float32, packs=True))


def padded_bfloat16() -> None:
    run_passes(adapted(torch.bfloat16, packs=False))


def trained_head() -> None:
    """A model whose own weights are trained, on one rank and without FSDP."""
    base = base_on_gpu(torch.bfloat16)
    base.requires_grad_(True)
    base.eval()
    head = _put_head(base)
    model = PolicyModel(base, head, {}, AdapterRouting(1), 64, _set_up_attention(base, True))
    batch = micro_batch()
    batch = msgspec.structs.replace(batch, run_idxs=[0] * len(batch.run_idxs))
    forward_backward(model, batch, [AipoLossConfig()] * len(batch.run_idxs), GPU)
    assert all(leaf.grad is not None and leaf.grad.device == GPU for leaf in base.parameters())


def updates() -> None:
    """Two passes and an update of every run, what is published and saved, and one more update from there."""
    update_all(USUAL)


def updates_of_other_kinds() -> None:
    update_all([kind for kind in OPTIMIZERS if kind not in USUAL])


def update_all(optimizers: Sequence[str]) -> None:
    model = adapted(torch.bfloat16, packs=True)
    world = World(0, 1, GPU, dist.HashStore(), cast(Any, None))  # a group of one loses no rank
    for kinds in batched(optimizers, NUM_RUNS):
        with tempfile.TemporaryDirectory() as folder:
            update_with(kinds, model, world, Path(folder))


def update_with(kinds: Sequence[str], model: PolicyModel, world: World, workspace: Path) -> None:
    """Run 0 has the largest rank, run 1 a lower one; run 2 is kept in bfloat16."""
    base = Path("some/model")
    ranks: list[dict[str, Any]] = [{"rank": 16}, {"rank": 8}, {"rank": 16, "dtype": "bfloat16"}]
    for run_idx, (kind, lora) in enumerate(zip(kinds, ranks, strict=True)):
        optim = {"type": kind, "weight_decay": 0.1, "max_norm": 0.25}
        write_run(workspace, f"run_{run_idx}", base, optim=optim, model={"lora": lora}, loss={"kl_coef": 0.1})
    limits = TrainerLimits(str(base), 64, 16, 32)
    manager = MultiRunManager(workspace, NUM_RUNS, limits=limits, channel=Channel())
    for name, layer in model.layers.items():
        layer.register_with_runs(manager, name)

    def create(run_idx: int, run_id: str) -> None:
        run = manager.run(run_idx)
        weights = FlatWeights(manager.get_named_parameters_for_run(run_idx), manager.rank_of(run_idx))
        run.optimizer = RunOptimizer(run.config, weights, manager.dtype_of(run_idx), world, 0)

    manager.register_creation_hook(create)
    manager.discover_runs()
    manager.synchronize_state()
    assert len(manager.used) == NUM_RUNS, manager.findings
    snapshots, step = AdapterSnapshots(manager, str(base), LORA), TrainStep(model, manager, world)
    for seed in range(2):
        step.forward_backward(micro_batch(seed))
    for run in manager.used:
        report = step.update(run, ReadyRun(run.run_idx, 10, 1))
        assert report.problem is None, report.problem
        taken = snapshots.whole(run)
        weights = cast(AdapterSnapshot, taken.weights).tensors
        assert taken.state is not None
        tensors = [leaf for leaf in tree_leaves(taken.state) if isinstance(leaf, Tensor)]
        assert {each.device.type for each in (*tensors, *weights.values())} == {"cpu"}
        # Not `snapshots.restore`: the state of a generator is bytes, and here there are none.
        manager.load_state_dict_for_run(run.run_idx, weights)
        run.training.load_state_dict(taken.state)
    step.forward_backward(micro_batch())
    for run in manager.used:
        report = step.update(run, ReadyRun(run.run_idx, 10, 1))
        assert report.problem is None, report.problem
        assert {leaf.device for _, leaf in manager.get_named_parameters_for_run(run.run_idx)} == {GPU}


class Launches(TorchDispatchMode):
    """Counts the operations of the GPU that compute something: what a GPU would be asked to launch."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        is_there = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves((args, kwargs, result)))
        self.number += is_there and not func.is_view and func.overloadpacket.__name__ not in COMPUTES_NOTHING
        return result


COMPUTES_NOTHING = ("device", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")


class OneKernelNorm(torch.autograd.Function):
    """As many operations as `rms_norm` is on a GPU, forward and backward, where this build has no kernel for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


def launches_of_a_layer(*, checkpoints: bool, shares: bool) -> int:
    """Of a pass of rows of three runs: the difference between models of three layers and of two."""
    numbers = []
    for num_layers in (2, 3):
        base = base_on_gpu(torch.bfloat16, num_layers)
        model = adapt_model(base, LORA, NUM_RUNS, checkpoints=checkpoints, packs=True)
        batch = msgspec.structs.replace(micro_batch(shares=shares), base_pass=False)
        losses = [AipoLossConfig()] * len(batch.run_idxs)
        with Launches() as launches:
            forward_backward(model, batch, losses, GPU)
        numbers.append(launches.number)
    return numbers[1] - numbers[0]


def launches() -> None:
    plain, torch.nn.functional.rms_norm = torch.nn.functional.rms_norm, lambda x, *_: OneKernelNorm.apply(x)
    try:
        numbers = [launches_of_a_layer(checkpoints=each, shares=False) for each in (True, False)]
        more = launches_of_a_layer(checkpoints=True, shares=True) - numbers[0]
    finally:
        torch.nn.functional.rms_norm = plain
    assert numbers[0] <= 150 and numbers[1] <= 120, f"{numbers} launches for each layer of a pass"
    assert 0 < more <= 12, f"{more} more where rows share positions"


def batched(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    assert len(values) % size == 0
    return [values[start : start + size] for start in range(0, len(values), size)]


SCENARIOS: list[Callable[[], None]] = [
    launches,
    packed_bfloat16,
    advantages_of_tokens,
    packed_bfloat16_of_an_odd_rank,
    offloaded,
    packed_float32,
    padded_bfloat16,
    trained_head,
    updates,
    updates_of_other_kinds,
]


def traced(scenario: Callable[[], None]) -> dict[str, Any]:
    error = None
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder:
        try:
            scenario()
        except Exception:
            error = traceback.format_exc()
    return {"error": error, "operations": sorted(recorder.operations), "waits": recorder.waits}


def main() -> None:
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # of the device that computes nothing
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    print(json.dumps({each.__name__: traced(each) for each in SCENARIOS if each.__name__ in sys.argv[2:]}))


if __name__ == "__main__":
    main()
