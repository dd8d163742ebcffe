"""`max_concurrent_runs` and `max_tokens_per_micro_batch` = "auto": what fits into the memory that is free."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import InferenceStatus, StatusWriter
from prime_rl.trainer import capacity
from prime_rl.trainer.capacity import FRAGMENTS, MOST_AUTO_SLOTS, MOST_TOKENS, of_all_runs, with_a_budget
from prime_rl.trainer.loop import await_inference
from prime_rl.trainer.memory import predict, setting_of
from prime_rl.trainer.model import ModelError
from tests.budgets import in_full
from tests.patience import PATIENCE_S
from tests.trainer_support import solo_world, trainer_config, write_model

# One worker measures each shape once.
pytestmark = pytest.mark.xdist_group("fit")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one layer, which is measured in a moment; one for all, so that each shape is measured once."""
    file = write_model(tmp_path_factory.mktemp("model")) / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}))
    return file.parent


def free(monkeypatch: pytest.MonkeyPatch, usable: float) -> None:
    monkeypatch.setattr(capacity, "_free_bytes", lambda device, share: usable / (1.0 - FRAGMENTS))


def asked(workspace: Path, base: Path, **changes: Any) -> TrainerConfig:
    return trainer_config(workspace, base, **{"max_tokens_per_micro_batch": "auto", "seq_len": 1024, **changes})


def peak(config: TrainerConfig) -> float:
    return predict(setting_of(config, "cpu", 1)).peak


def test_a_trainer_that_shares_its_gpu_starts_once_inference_has_its_part(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    status = StatusWriter(output.inference_status, InferenceStatus())
    waits = threading.Thread(target=await_inference, args=(output, lambda: False, 2))
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()
    await_inference(output, lambda: True)  # it is to end
    status.update(state="serving")
    waits.join(0.2)
    assert waits.is_alive(), "the second server has not begun"
    second = StatusWriter(output.replica_status(1), InferenceStatus())
    second.update(state="serving")
    waits.join(PATIENCE_S)
    assert not waits.is_alive()
    status.close(state="stopped")
    second.close(state="stopped")
    await_inference(output, lambda: False, no_sign_s=0.0)  # there is none


def test_a_trainer_takes_its_share_of_a_gpu_once_also_where_all_numbers_are_set(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = list[float]()
    monkeypatch.setattr(capacity, "take_share", lambda share: shares.append(share) or 1e12)
    config = trainer_config(tmp_path, model, gpu_share=0.25, model={"activation_checkpointing": True})
    assert with_a_budget(config, replace(solo_world(), device=torch.device("cuda"))) == config
    assert shares == [0.25]


def test_numbers_stay(tmp_path: Path, model: Path) -> None:
    config = trainer_config(tmp_path, model, max_tokens_per_micro_batch=77)
    assert with_a_budget(config, solo_world()) is config


def test_tokens_are_as_many_as_fit(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = asked(tmp_path, model)
    assert with_a_budget(config, solo_world()).micro_batch_tokens == MOST_TOKENS, "the model is tiny"
    setting = setting_of(config, "cpu", 1)
    usable = 1.5 * predict(setting).peak
    free(monkeypatch, usable)
    found = with_a_budget(config, solo_world())
    assert setting.tokens < found.micro_batch_tokens < 4 * setting.tokens
    assert peak(found) <= usable and found.max_concurrent_runs == config.max_concurrent_runs


def test_slots_are_as_many_as_fit_beside_the_pass(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = asked(tmp_path, model, max_concurrent_runs="auto", max_tokens_per_micro_batch=256, seq_len=64)
    assert with_a_budget(config, solo_world()).max_concurrent_runs == MOST_AUTO_SLOTS, "the model is tiny"
    eight = predict(setting_of(config.model_copy(update={"max_concurrent_runs": 8}), "cpu", 1))
    usable = eight.peak + 0.5 * (eight.adapters + eight.optimizer) / 8
    free(monkeypatch, usable)
    found = with_a_budget(config, solo_world())
    assert (found.max_concurrent_runs, found.max_tokens_per_micro_batch) == (8, 256)
    assert peak(found) <= usable


def test_of_two_autos_slots_come_first_and_tokens_take_the_rest(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = asked(tmp_path, model, max_concurrent_runs="auto", seq_len=2048)
    one = setting_of(config.model_copy(update={"max_concurrent_runs": 1}), "cpu", 1)
    usual, row = predict(replace(one, num_runs=one.num_rows)), predict(replace(one, tokens=2048))
    each = (usual.adapters + usual.optimizer) / one.num_rows
    free(monkeypatch, usual.peak - (one.num_rows - 2.5) * each)
    found = with_a_budget(config, solo_world())
    assert found.max_concurrent_runs == 2 and one.tokens <= found.micro_batch_tokens < 1.1 * one.tokens
    free(monkeypatch, row.peak + 0.5 * each)
    found = with_a_budget(config, solo_world())
    assert (found.max_concurrent_runs, found.micro_batch_tokens) == (1, 2048), "the usual pass does not fit, a row does"


@pytest.mark.parametrize(("lora", "expected"), [(True, [False, "mlp", True]), (False, [False, True])])
def test_on_a_gpu_as_little_is_computed_again_as_fits_beside_the_largest_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool, expected: list[bool | str]
) -> None:
    file = write_model(tmp_path / "model") / "config.json"
    shape = json.loads(file.read_text())
    num_layers = 12  # enough that what they keep is more than one takes that is at work
    shape |= {"num_hidden_layers": num_layers, "layer_types": num_layers * shape["layer_types"][:1]}
    file.write_text(json.dumps(shape))
    changes = {} if lora else {"model": {"lora": None}, "max_concurrent_runs": 1}
    config = trainer_config(tmp_path, file.parent, max_tokens_per_micro_batch=2048, seq_len=256, **changes)
    config = config.model_copy(update={"model": config.model.model_copy(update={"activation_checkpointing": "auto"})})

    def chosen(config: TrainerConfig, usable: float, device: str = "cuda") -> TrainerConfig:
        free(monkeypatch, usable)
        return with_a_budget(config, replace(solo_world(), device=torch.device(device)))

    def kept(again: bool | str) -> TrainerConfig:
        return config.model_copy(update={"model": config.model.model_copy(update={"activation_checkpointing": again})})

    peaks = [predict(of_all_runs(setting_of(kept(again), "cuda", 1))).peak for again in expected]
    assert peaks == sorted(peaks, reverse=True)
    for again, usable in zip(expected, peaks, strict=True):
        assert chosen(config, usable * 1.001) == kept(again)
    assert chosen(config, peaks[-1] / 2) == kept(True), "a pass that does not fit is done in halves"
    assert chosen(config, 1e12, "cpu") is config
    offloaded = config.model_copy(update={"model": config.model.model_copy(update={"activation_offload": True})})
    assert chosen(offloaded, 1e12) == offloaded, "it keeps what layers read, in host memory"
    assert chosen(kept(True), 1e12) == kept(True), "as it is set"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, r"^max_tokens_per_micro_batch = 'auto': a row of seq_len = 1024 does not fit .* lower seq_len"),
        *in_full(
            (
                {"max_concurrent_runs": "auto"},
                r"^max_concurrent_runs = 'auto': one run with a pass of 1,024 tokens does not",
            )
        ),
        ({"model": {"lora": None}, "max_concurrent_runs": "auto"}, r"or train on more GPUs"),
    ],
)
def test_what_does_not_fit_is_told_with_what_to_lower(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    free(monkeypatch, 1000.0)
    with pytest.raises(ModelError, match=words) as caught:
        with_a_budget(asked(tmp_path, model, **changes), solo_world())
    assert "\n" not in str(caught.value)


def test_full_fine_tuning_has_one_slot_and_as_many_tokens_as_fit(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = asked(tmp_path, model, max_concurrent_runs="auto", model={"lora": None})
    usable = 1.2 * peak(config)
    free(monkeypatch, usable)
    found = with_a_budget(config, solo_world())
    assert found.max_concurrent_runs == 1 and 8192 < found.micro_batch_tokens < 4 * 8192
    assert peak(found) <= usable


def test_an_unknown_model_is_told_before_it_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^model\.name: .*nowhere not found"):
        with_a_budget(asked(tmp_path, tmp_path / "nowhere", max_concurrent_runs="auto"), solo_world())
