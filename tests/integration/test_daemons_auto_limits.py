"""`prl up` with `max_concurrent_runs = "auto"`: counted once, the same for trainer and inference, and kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w
from transformers import AutoConfig

from prime_rl.configs.base import load_toml
from prime_rl.contract.layout import OutputDir
from prime_rl.trainer.capacity import MOST_AUTO_SLOTS
from tests.daemons_support import Prl, fake_workspace
from tests.trainer_support import write_model

AUTO = ("--max_concurrent_runs", "auto", "--trainer.device", "cpu")


@pytest.fixture
def prl(tmp_path: Path) -> Prl:
    prl = fake_workspace(tmp_path)
    write_model(prl.model)
    return prl


def slots(prl: Prl) -> list[object]:
    output = OutputDir(prl.output_dir)
    saved = [load_toml(output.component_config(name)) for name in ("system", "trainer", "inference")]
    return [config["max_concurrent_runs"] for config in saved]


@pytest.mark.release
def test_slots_are_counted_once_and_kept_until_what_decides_them_changes(prl: Prl) -> None:
    out = prl(*prl.up_args(*AUTO)).stdout
    try:
        assert "max_concurrent_runs = 'auto': counting" in out
        assert slots(prl) == [MOST_AUTO_SLOTS] * 3, "the model is tiny"
        assert f"{MOST_AUTO_SLOTS} slots, inference at" in out
        assert len(prl.json("status")["slots"]) == MOST_AUTO_SLOTS
    finally:
        prl("down")
    # As if there had been less memory then.
    saved = OutputDir(prl.output_dir).component_config("system")
    system = load_toml(saved)
    for table in (system, system["trainer"], system["inference"]):
        table["max_concurrent_runs"] = 7
    saved.write_text(tomli_w.dumps(system))
    out = prl("up").stdout  # with its last settings
    try:
        assert "7 slots, as counted before" in out and "counting" not in out and slots(prl) == [7] * 3
    finally:
        prl("down")
    out = prl("up", "--lora.rank", "8").stdout
    try:
        assert "counting" in out and slots(prl) == [MOST_AUTO_SLOTS] * 3
    finally:
        prl("down")


@pytest.mark.release
def test_what_does_not_fit_is_one_line_and_nothing_is_started(prl: Prl) -> None:
    sizes = {"hidden_size": 262_144, "intermediate_size": 1_048_576, "num_hidden_layers": 1}
    AutoConfig.for_model("qwen3", **sizes).save_pretrained(prl.model)
    done = prl(*prl.up_args(*AUTO), exit_code=1)
    (line,) = done.stderr.splitlines()
    assert "max_concurrent_runs = 'auto': one run with a pass of 8,192 tokens does not fit" in line
    assert "lower max_tokens_per_micro_batch, seq_len" in line and "set max_concurrent_runs to a number" in line
    assert not prl.members() and not OutputDir(prl.output_dir).component_config("system").exists()
