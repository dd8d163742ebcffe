"""The model as the trainer calls it: the same numbers however little of them is kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from prime_rl.configs.base import DEFAULT_TARGET_MODULES, LoRAConfig
from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.lora import parts
from prime_rl.trainer.model import (
    ModelError,
    PackedRows,
    PolicyModel,
    Segments,
    Targets,
    _by_kernel,
    _by_stretches,
    adapt_model,
)
from tests.numeric import check_same, num_terms
from tests.trainer_support import tiny_model

NUM_ROWS, NUM_TOKENS = 3, 24
HIDDEN_SIZE, NUM_VOCABULARY = 32, 71  # no other dimension of the model is 71
RUN_IDXS = [0, 1, 1]


def adapted(*, targets: tuple[str, ...] = DEFAULT_TARGET_MODULES, **options: bool) -> PolicyModel:
    """Two adapters with weights that matter."""
    base = tiny_model()
    base.resize_token_embeddings(NUM_VOCABULARY, mean_resizing=False)
    model = adapt_model(base, LoRAConfig(rank=4, target_modules=targets), 2, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.adapters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def some_targets() -> tuple[Tensor, Targets]:
    generator = torch.Generator().manual_seed(1)
    ids_RT = torch.randint(0, NUM_VOCABULARY, (NUM_ROWS, NUM_TOKENS), generator=generator)
    at_N = torch.randperm(NUM_ROWS * (NUM_TOKENS - 1), generator=generator)[:20].sort().values
    at_N += at_N // (NUM_TOKENS - 1)  # the last position of a row predicts nothing
    return ids_RT, Targets(at_N, ids_RT.flatten()[at_N + 1], 0.5 + torch.rand(20, generator=generator))


def gradients(model: PolicyModel) -> list[Tensor]:
    found = [parameter.grad for parameter in model.adapters()]
    assert all(grad is not None and grad.any() for grad in found)
    return [grad for grad in found if grad is not None]


@contextmanager
def saved_shapes() -> Iterator[list[torch.Size]]:
    """Shapes of what autograd keeps for backward."""
    shapes: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield shapes


class LargestLogits(TorchDispatchMode):
    """The most rows of any table over the vocabulary that an operation makes, but the head's own weight."""

    num_rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            is_table = isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.shape[1] == NUM_VOCABULARY
            if is_table and len(leaf) != HIDDEN_SIZE:
                self.num_rows = max(self.num_rows, len(leaf))
        return result


@pytest.mark.numeric
def test_log_probabilities_are_those_of_the_logits() -> None:
    model, (ids_RT, targets) = adapted(), some_targets()
    logprobs_N, entropy_N, _ = model.token_logprobs(ids_RT, RUN_IDXS, targets)
    with torch.no_grad():
        logits_NV = model.logits(ids_RT, torch.arange(NUM_TOKENS), RUN_IDXS).flatten(0, 1)[targets.at_N]
    all_NV = torch.log_softmax(logits_NV / targets.temperatures_N[:, None], -1)
    check_same(logprobs_N, all_NV.gather(-1, targets.ids_N[:, None])[:, 0], num_terms(model.module))
    check_same(entropy_N, -(all_NV.exp() * all_NV).sum(-1), num_terms(model.module))
    assert logprobs_N.requires_grad and not entropy_N.requires_grad


def test_no_more_than_a_chunk_of_the_logits_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "CHUNK_BYTES", 4 * NUM_VOCABULARY * 6)
    model, (ids_RT, targets) = replace(adapted(), remakes=False), some_targets()  # else its own hooks are asked
    with LargestLogits() as seen, saved_shapes() as shapes:
        logprobs_N, *_ = model.token_logprobs(ids_RT, RUN_IDXS, targets)
        logprobs_N.sum().backward()
    assert seen.num_rows == 6 and not any(shape[-1] == NUM_VOCABULARY for shape in shapes if shape)


@pytest.mark.numeric
@pytest.mark.parametrize(("modes", "share"), [({"checkpoints": True}, 0.25), ({"lean_mlps": True}, 0.85)])
def test_what_is_computed_again_gives_the_same_gradients_and_is_not_kept(modes: dict[str, bool], share: float) -> None:
    found, kept = [], []
    for each in ({}, modes):
        model, (ids_RT, targets) = replace(adapted(**each), remakes=False), some_targets()
        with saved_shapes() as shapes:
            logprobs_N, *_ = model.token_logprobs(ids_RT, RUN_IDXS, targets)
        logprobs_N.sum().backward()
        found.append([logprobs_N.detach(), *gradients(model)])
        kept.append(sum(shape.numel() for shape in shapes))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    assert kept[1] < share * kept[0]


class Products(TorchDispatchMode):
    """How many products there were with a table of this shape on the right."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.num, self._shape = 0, shape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        right = {"aten::mm": 1, "aten::addmm_": 2}.get(func._schema.name)
        self.num += right is not None and tuple(args[right].shape) == self._shape
        return func(*args, **(kwargs or {}))


def test_a_layer_that_is_computed_again_leaves_out_its_last_product() -> None:
    """Its result is not asked for, and what the product's own backward needs is there."""
    model, (ids_RT, targets) = adapted(checkpoints=True), some_targets()
    config = model.module.config
    with Products(config.intermediate_size, config.hidden_size) as forward:
        logprobs_N, *_ = model.token_logprobs(ids_RT, RUN_IDXS, targets)
    with Products(config.intermediate_size, config.hidden_size) as backward:
        logprobs_N.sum().backward()
    assert forward.num == config.num_hidden_layers
    assert backward.num == 2 * config.num_hidden_layers, "the gradients of gate and up, and no third"


class Copied(TorchDispatchMode):
    """The shapes of what is copied to the host, if the tensors are there already: from memory to memory."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.shapes.append(args[0].shape)
        return func(*args, **(kwargs or {}))


@pytest.mark.numeric
def test_offloaded_inputs_of_layers_give_the_same_gradients() -> None:
    found, copied = [], []
    for offloads in (False, True):
        model, (ids_RT, targets) = adapted(checkpoints=True, offloads=offloads), some_targets()
        with Copied() as seen:
            logprobs_N, *_ = model.token_logprobs(ids_RT, RUN_IDXS, targets)
        logprobs_N.sum().backward()
        found.append([logprobs_N.detach(), *gradients(model)])
        copied.append(seen.shapes.count(torch.Size([NUM_ROWS, NUM_TOKENS, HIDDEN_SIZE])))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    # One for each of both layers, and nothing else that a layer works out.
    assert copied[1] == copied[0] + 2


def test_activation_offload_is_for_checkpointed_layers() -> None:
    assert TrainerModelConfig(activation_offload=True).checkpoints_on("cpu")
    with pytest.raises(ValueError, match="activation_offload = true requires activation_checkpointing"):
        TrainerModelConfig(activation_offload=True, activation_checkpointing=False)
    with pytest.raises(ValueError, match="activation_checkpointing = 'mlp' requires"):
        TrainerModelConfig(activation_checkpointing="mlp")
    lean = TrainerModelConfig(activation_checkpointing="mlp", lora=LoRAConfig())
    assert lean.lean_mlps and not lean.checkpoints_on("cuda")


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [("auto", "cpu", False), ("auto", "cuda", True), (True, "cpu", True), (False, "cuda", False)],
)
def test_activation_checkpointing_is_for_gpus_unless_it_is_set(setting: Any, device: str, expected: bool) -> None:
    assert TrainerModelConfig(activation_checkpointing=setting).checkpoints_on(device) is expected


@pytest.mark.parametrize(("name", "value"), [("final_logit_softcapping", 30.0), ("logits_scaling", 8.0)])
def test_a_model_that_changes_its_logits_after_the_head_is_refused(name: str, value: float) -> None:
    base = tiny_model()
    setattr(base.config, name, value)
    with pytest.raises(ModelError, match=f"config.json sets {name}"):
        adapt_model(base, LoRAConfig(rank=4), 1)


def test_an_adapter_on_the_head_is_refused() -> None:
    with pytest.raises(ModelError, match="lm_head cannot have an adapter"):
        adapted(targets=("q_proj", "lm_head"))


def test_adapters_on_experts_are_refused_by_name() -> None:
    """Also where some layers have no experts: there the names would match, and the experts would not be trained."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 16, "vocab_size": 71}
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4}
    config = Qwen3MoeConfig(**sizes, **shape, num_experts_per_tok=2, mlp_only_layers=[0])
    base = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=r"target_modules \['down_proj', 'gate_proj', 'up_proj'\] .* experts"):
        adapt_model(base, LoRAConfig(rank=4), 1)
    attention = ("q_proj", "v_proj")
    model = adapt_model(base, LoRAConfig(rank=4, target_modules=attention), 1)
    assert {name.rpartition(".")[2] for name in model.layers} == set(attention)


def of_torch_211(*given: Any, scale: float, window_size: tuple[int, int]) -> Tensor:
    """What `varlen_attn` computes on a GPU: attention, causal from the end of each sample, with fewer KV heads."""
    query, key, value, ends_q, ends_k, *longest = given
    assert window_size == (-1, 0) and longest == [max(ends.diff()) for ends in (ends_q, ends_k)]
    parts, pairs = [], (itertools.pairwise(ends.tolist()) for ends in (ends_q, ends_k))
    for (start, stop), (first, last) in zip(*pairs, strict=True):
        num, seen = stop - start, last - first
        sample = (query[start:stop], key[first:last], value[first:last])
        mask = torch.ones(num, seen, dtype=torch.bool).tril(seen - num)
        q, k, v = (each.transpose(0, 1) for each in sample)
        options: dict[str, Any] = {"attn_mask": mask, "scale": scale, "enable_gqa": True}
        parts.append(nn.functional.scaled_dot_product_attention(q, k, v, **options))
    return torch.cat(parts, dim=1).transpose(0, 1)


def of_torch_213(*given: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
    assert enable_gqa
    return of_torch_211(*given, **options)


@pytest.mark.parametrize("kernel", [of_torch_211, of_torch_213])
def test_the_kernel_of_a_gpu_is_called_as_each_torch_takes_it(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.12 it has no `enable_gqa`, and needs none."""
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", kernel)
    rows = PackedRows(seen=(6, 5, 5, 9, 4), shared=(0, 3, 3, 4, 0))
    segments = Segments.of(rows, torch.device("cpu"))
    shapes = [(1, heads, sum(rows.computed), 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    found, expected = (each(*inputs, segments, 0.3) for each in (_by_kernel, _by_stretches))
    torch.testing.assert_close(found, expected)
    grads = (torch.autograd.grad(out.square().sum(), inputs) for out in (found, expected))
    torch.testing.assert_close(*grads)
