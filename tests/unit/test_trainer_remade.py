"""What backward makes again: not kept, and not one bit of a gradient changes."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from prime_rl.lora import parts
from prime_rl.lora.parts import FrozenRMSNorm, made_again, recipe_of, remember
from prime_rl.trainer.model import PackedRows, PolicyModel
from tests.unit.test_trainer_model import RUN_IDXS, adapted, gradients, some_targets

# Of each layer of the tiny model: before attention and the MLP, of queries and of keys; and the last one.
NUM_NORMS, NUM_ROTATED = 4 * 2 + 1, 2 * 2


def passed(model: PolicyModel, *, packs: bool) -> list[Tensor]:
    ids_RT, targets = some_targets()
    rows = None
    if packs:
        rows, ids_RT = PackedRows((ids_RT.shape[1],) * len(ids_RT), (0,) * len(ids_RT)), ids_RT.view(1, -1)
    logprobs_N, entropy_N, _ = model.token_logprobs(ids_RT, RUN_IDXS, targets, rows)
    logprobs_N.sum().backward()
    return [logprobs_N.detach(), entropy_N, *gradients(model)]


@pytest.mark.numeric
@pytest.mark.parametrize("packs", [False, True])
def test_no_bit_changes(packs: bool) -> None:
    ours = adapted(packs=packs)
    assert ours.remakes and not adapted(checkpoints=True).remakes
    plain = replace(adapted(packs=packs), remakes=False)
    found, expected = passed(ours, packs=packs), passed(plain, packs=packs)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("remakes", [True, False])
def test_results_of_norms_and_rotated_queries_and_keys_are_not_kept(
    remakes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(adapted(), remakes=remakes)
    normalized: list[weakref.ref[torch.UntypedStorage]] = []
    rotated: list[weakref.ref[torch.UntypedStorage]] = []
    for module in model.module.modules():
        if isinstance(module, FrozenRMSNorm):
            module.register_forward_hook(
                lambda module, args, out: normalized.append(weakref.ref(out.untyped_storage()))
            )
    rotate = parts._rotate

    def watched(*args: Tensor) -> Tensor:
        out = rotate(*args)
        rotated.append(weakref.ref(out.untyped_storage()))
        return out

    monkeypatch.setattr(parts, "_rotate", watched)
    ids_RT, targets = some_targets()
    logprobs_N, *_ = model.token_logprobs(ids_RT, RUN_IDXS, targets)
    assert (len(normalized), len(rotated)) == (NUM_NORMS, NUM_ROTATED)
    alive = [sum(each() is not None for each in some) for some in (normalized, rotated)]
    # The last norm's goes into the head; those of queries and keys are kept by nobody.
    assert alive == ([0, 0] if remakes else [2 * 2, NUM_ROTATED])
    logprobs_N.sum().backward()


def test_a_result_that_was_changed_in_place_is_kept_as_it_is() -> None:
    x = torch.tensor([1.0, 2.0])
    slope = torch.ones(2, requires_grad=True)
    with made_again():
        result = 2 * x
        remember(result, lambda x: 2 * x, x)
        out = slope * result.add_(1)
    out.sum().backward()
    assert slope.grad is not None and slope.grad.tolist() == [3.0, 5.0]


def test_views_are_made_again_with_their_strides() -> None:
    x = torch.arange(12.0)
    slope = torch.ones(3, 2, requires_grad=True)
    with made_again():
        result = 2 * x
        remember(result, lambda x: 2 * x, x)
        out = slope * result.view(4, 3)[1:3].T
        x = x.clone()
        del result
    out.sum().backward()
    assert slope.grad is not None and slope.grad.tolist() == [[6.0, 12.0], [8.0, 14.0], [10.0, 16.0]]


def test_what_is_remembered_is_not_kept_alive_and_what_lies_there_next_is_another() -> None:
    slope = torch.ones(2, requires_grad=True)
    with made_again():
        for number in range(1, 10):
            result = torch.full((2,), float(number))
            assert recipe_of(result) is None  # the last one's memory, most likely
            remember(result, torch.zeros, 2)
            assert recipe_of(result) is not None
            life = StorageWeakRef(result.untyped_storage())
            del result
            assert life.expired()
        out = slope * torch.full((2,), 5.0)
    out.sum().backward()
    assert slope.grad is not None and slope.grad.tolist() == [5.0, 5.0]
    result = torch.ones(2)
    remember(result, torch.ones, 2)
    assert recipe_of(result) is None


def test_a_layer_that_is_computed_again_as_a_whole_has_its_own_way() -> None:
    x = torch.ones(2, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        result = x.detach() * 2
        remember(result, torch.mul, x, 2)
        return x * result

    with made_again():
        out = checkpoint(layer, x, use_reentrant=False)
    out.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]
