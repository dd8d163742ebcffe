"""`max_tokens_per_micro_batch = "auto"`: what fits into the memory that is free, or a clear end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prime_rl.trainer import budget
from prime_rl.trainer.budget import with_a_budget
from prime_rl.trainer.fit.capacity import FRAGMENTS
from prime_rl.trainer.fit.predict import predict, setting_of
from prime_rl.trainer.model import ModelError
from tests.trainer_support import trainer_config, write_model

CPU = torch.device("cpu")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def test_a_number_stays(tmp_path: Path, model: Path) -> None:
    config = trainer_config(tmp_path, model, max_tokens_per_micro_batch=77)
    assert with_a_budget(config, CPU, 1) is config


def test_auto_is_what_fits(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = trainer_config(tmp_path, model, max_tokens_per_micro_batch="auto")
    assert with_a_budget(asked, CPU, 1).micro_batch_tokens == budget.MOST_TOKENS, "the model is tiny"
    setting = setting_of(asked, "cpu", 1)
    free = 1.5 * predict(setting).peak / (1.0 - FRAGMENTS)
    monkeypatch.setattr(budget, "_free_bytes", lambda device: free)
    config = with_a_budget(asked, CPU, 1)
    assert setting.tokens < config.micro_batch_tokens < 4 * setting.tokens
    assert predict(setting_of(config, "cpu", 1)).peak <= free * (1.0 - FRAGMENTS)


def test_what_does_not_fit_is_said_with_what_to_lower(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "_free_bytes", lambda device: 1000.0)
    asked = trainer_config(tmp_path, model, max_tokens_per_micro_batch="auto")
    with pytest.raises(ModelError, match=r"a row of seq_len = 64 does not fit .* lower seq_len"):
        with_a_budget(asked, CPU, 1)


def test_full_fine_tuning_needs_a_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"requires \[model.lora\]"):
        trainer_config(
            tmp_path, tmp_path, max_tokens_per_micro_batch="auto", max_concurrent_runs=1, model={"lora": None}
        )
