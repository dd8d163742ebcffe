"""The acceptance of a GPU: the whole system at the shape of a real model, and the kernels that only a GPU takes.

.venv/bin/python -m pytest -s tests/gpu

What it measured is then in `build/acceptance.json`. The tiny scale is the same on a CPU, and so are the comparisons of
kernels, by the ways that a CPU takes: they show that the tests themselves work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from prime_rl.lora.linear import GroupedPlan, Layers, LoopedPlan, Tables, TokenGroup, grouped_lora, make_plan
from prime_rl.trainer.model import PackedRows, Segments, packed_attention
from tests.gpu.acceptance import QWEN, RESULTS, RUN_IDS, TINY, Scale, train_two_runs, write_workspace
from tests.numeric import check_same
from tests.system_support import Workspace, closed

HAS_GPU = torch.cuda.is_available()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="there is no CUDA device")]
# A build of vLLM is for one of the two.
ON_CPU = [pytest.mark.skipif(HAS_GPU, reason="there is a CUDA device: the real scale is run")]
DEVICES = [
    pytest.param("cuda", torch.bfloat16, marks=ON_GPU),
    pytest.param("cpu", torch.float32),
    pytest.param("cpu", torch.bfloat16),
]
# How far the real peak may be from `prl fit`.
MEMORY_TOLERANCE = 0.15


@pytest.fixture(
    params=[pytest.param(QWEN, marks=[*ON_GPU, pytest.mark.vllm]), pytest.param(TINY, marks=ON_CPU)],
    ids=lambda each: each.name,
)
def scale(request: pytest.FixtureRequest) -> Scale:
    found: Scale = request.param
    return found


@pytest.fixture
def workspace(scale: Scale, tmp_path: Path) -> Iterator[Workspace]:
    yield from closed(write_workspace(tmp_path, scale))


@pytest.mark.slow
def test_two_runs_train_within_the_memory_and_the_mismatch_that_are_promised(
    scale: Scale, workspace: Workspace
) -> None:
    found = train_two_runs(workspace, scale)
    found.record()
    assert workspace.processes() == []
    assert found.updates == dict.fromkeys(RUN_IDS, scale.num_updates)
    assert 0 <= found.worst_mismatch_kl <= scale.max_mismatch_kl
    assert min(*found.trainer_tokens_per_s.values(), *found.sampled_tokens_per_s.values()) > 0
    assert json.loads(RESULTS.read_text())["peak_gib"] == found.peak_gib
    if scale.device == "cuda":
        assert found.peak_gib == pytest.approx(found.predicted_gib, rel=MEMORY_TOLERANCE)
    else:  # the peak of a process has its libraries in it, which are larger than this model
        assert found.peak_gib > found.predicted_gib > 0


def random_tensor(generator: torch.Generator, *shape: int) -> Tensor:
    """Bits that do not depend on the device."""
    return torch.randn(*shape, generator=generator)


@pytest.mark.numeric
@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_packed_attention_is_that_of_a_mask_of_blocks(device: str, dtype: torch.dtype) -> None:
    """Outputs and gradients; on a GPU the kernel of packed samples, on a CPU a call for each stretch."""
    lengths, num_heads, num_kv, size = [7, 64, 64, 1, 200], 8, 2, 64
    num_tokens, generator = sum(lengths), torch.Generator().manual_seed(0)
    query, key, value = (random_tensor(generator, 1, heads, num_tokens, size) for heads in (num_heads, num_kv, num_kv))
    grad = random_tensor(generator, 1, num_tokens, num_heads, size)
    block_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask_NN = (block_N[:, None] == block_N[None]).tril()

    def of_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_NN, enable_gqa=True)
        return out.transpose(1, 2)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention(
            nn.Identity(), q, k, v, None, segments=Segments.of(PackedRows((*lengths,), (0,) * len(lengths)), q.device)
        )[0]

    rounded = [each.to(dtype) for each in (query, key, value, grad)]
    # The reference in float64, from the same rounded numbers.
    expected = with_gradients(of_blocks, *(each.double() for each in rounded))
    found = with_gradients(packed, *(each.to(device) for each in rounded))
    for ours, theirs in zip(found, expected, strict=True):
        # The sums over a sample's keys, of products over a head.
        check_same(ours.cpu(), theirs, size + max(lengths), dtype)


def with_gradients(function, query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> list[Tensor]:  # type: ignore[no-untyped-def]
    inputs = [each.detach().requires_grad_() for each in (query, key, value)]
    out = function(*inputs)
    out.backward(grad)
    return [out, *(each.grad for each in inputs if each.grad is not None)]


@pytest.mark.numeric
@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_one_kernel_for_all_groups_is_the_loop_over_them(device: str, dtype: torch.dtype) -> None:
    sizes, num_in, num_out, rank = [3, 40, 1, 130], 64, 96, 16
    ends = list(accumulate(sizes))
    groups = [TokenGroup(at, end - size, end, 0.5 + at) for at, (size, end) in enumerate(zip(sizes, ends, strict=True))]
    generator = torch.Generator().manual_seed(0)
    x_NI, grad_NO = (random_tensor(generator, ends[-1], width).to(device, dtype) for width in (num_in, num_out))
    base = nn.Linear(num_in, num_out, bias=False)
    base.weight = nn.Parameter(random_tensor(generator, num_out, num_in).to(device, dtype), requires_grad=False)
    start = [
        (random_tensor(generator, rank, num_in).to(device), random_tensor(generator, num_out, rank).to(device))
        for _ in groups
    ]
    results = []
    for one_kernel in (True, False):
        plan = make_plan(groups, ends[-1], one_kernel=one_kernel)
        assert isinstance(plan, GroupedPlan if one_kernel else LoopedPlan)
        leaves_A, leaves_B = zip(
            *((A.clone().requires_grad_(), B.clone().requires_grad_()) for A, B in start), strict=True
        )
        x = x_NI.clone().requires_grad_()
        (out_NO,) = grouped_lora(x, Layers([base], Tables(leaves_A, leaves_B)), plan)
        out_NO.backward(grad_NO)
        results.append([out_NO, x.grad, *(leaf.grad for leaf in (*leaves_A, *leaves_B))])
    for found, expected in zip(*results, strict=True):
        assert found is not None and expected is not None
        check_same(found, expected, num_in + num_out + rank + max(sizes), dtype)
