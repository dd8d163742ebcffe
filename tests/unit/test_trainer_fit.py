"""What `prl fit` predicts: the meter, the straight line over layers, what fits, the figures that are promised."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prime_rl.configs.base import LoRAConfig
from prime_rl.configs.system import SHAPES
from prime_rl.configs.trainer import TrainerConfig, TrainerModelConfig
from prime_rl.lora.parts import CHUNK_BYTES
from prime_rl.trainer import fit as cli
from prime_rl.trainer.capacity import (
    GIB,
    MOST_AUTO_SLOTS,
    MOST_TOKENS,
    TOKENS_STEP,
    most_runs,
    most_served,
    most_tokens,
    served_bytes,
    split,
)
from prime_rl.trainer.memory import (
    HOST_COPIES,
    PassMemory,
    Setting,
    UnknownModel,
    measure,
    metered,
    model_config,
    predict,
    setting_of,
)
from scripts.outputs import OUTPUTS
from tests.budgets import in_full, in_release
from tests.daemons_support import ROOT
from tests.patience import PATIENCE_S
from tests.test_reference import check
from tests.warm import warm

# One worker measures each shape once.
pytestmark = pytest.mark.xdist_group("fit")

ROW_TOKENS = 256
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def tiny(num_layers: int = 6, **changes: Any) -> Setting:
    config = AutoConfig.for_model("qwen3", vocab_size=500, num_hidden_layers=num_layers, **TINY)
    setting = Setting(config, torch.float32, LoRAConfig(rank=4), num_runs=2, seq_len=32, tokens=128, checkpoints=False)
    return replace(setting, **changes)


def whole(num_layers: int = 6, **changes: Any) -> Setting:
    """Without adapters."""
    return tiny(num_layers, lora=None, num_runs=1, **changes)


def real(name: str, seq_len: int, tokens: int, num_runs: int = 8) -> PassMemory:
    return predict(Setting(model_config(name), torch.bfloat16, LoRAConfig(), num_runs, seq_len, tokens, True, True))


def test_the_meter_counts_each_memory_once_and_until_its_last_tensor_goes() -> None:
    with metered() as meter:
        one = torch.zeros(1000)
        view = one.view(10, 100)[2:]
        assert meter.alive == meter.peak == 4000
        del one
        assert meter.alive == 4000
        more = view + 1
        assert meter.alive == 4000 + 3200
        del view, more
        assert (meter.alive, meter.peak) == (0, 7200)
        meter.reset_peak()
        assert meter.peak == 0


@pytest.mark.parametrize(
    ("make", "dtype", "checkpoints"),
    [
        (tiny, torch.float32, False),
        *in_full((whole, torch.bfloat16, True)),
        *in_release((tiny, torch.float32, True), (tiny, torch.bfloat16, False), (tiny, torch.bfloat16, True)),
        *in_release((whole, torch.float32, False), (whole, torch.float32, True), (whole, torch.bfloat16, False)),
    ],
)
def test_a_few_layers_tell_what_all_of_them_take(
    make: Callable[..., Setting], dtype: torch.dtype, checkpoints: bool
) -> None:
    setting = make(checkpoints=checkpoints, dtype=dtype)
    found, measured = predict(setting), measure(setting, 6)
    assert vars(found) == pytest.approx(vars(measured), rel=1e-9)
    assert found.peak > found.weights + found.adapters + found.optimizer


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny, *in_full(whole)])
def test_offloaded_inputs_of_layers_are_in_the_memory_of_the_host(make: Callable[..., Setting]) -> None:
    setting = make(checkpoints=True, tokens=1024)  # more than the gradients of a pass
    kept, found = predict(setting), predict(replace(setting, offloads=True))
    one_layer = 4 * setting.tokens * TINY["hidden_size"]
    assert (kept.offloaded, found.offloaded) == (0, 6 * one_layer)
    assert kept.activations - found.activations == 6 * one_layer
    # In backward the layer that is at work has its input on the device.
    assert 4 * one_layer <= kept.peak - found.peak <= 6 * one_layer
    assert found.peak == sum(vars(found).values()) - found.offloaded
    assert vars(found) == pytest.approx(vars(measure(replace(setting, offloads=True), 6)), rel=1e-9)


@pytest.mark.slow
def test_what_is_largest_may_change_with_the_number_of_layers() -> None:
    """With few layers and a large vocabulary it is the gradients of the embedding, with many what the layers keep."""
    setting = whole(24, tokens=64)
    setting.model.vocab_size = 40_000
    assert vars(predict(setting)) == pytest.approx(vars(measure(setting, 24)), rel=1e-9)


def test_a_whole_model_is_kept_in_float32_with_gradients_and_moments() -> None:
    frozen, found = predict(tiny(1)), predict(whole(1, dtype=torch.bfloat16))
    assert found.weights == found.adapters == found.optimizer / 2 == pytest.approx(frozen.weights, abs=200)
    copies = predict(whole(1, dtype=torch.bfloat16, host_copies=4))
    assert copies == replace(found, weights=5 * found.weights)


RANKS = """
import sys
from tests.unit.test_trainer_fit import predict, whole
import json
print(json.dumps([vars(predict(whole(1, checkpoints=True, num_ranks=ranks))) for ranks in (1, 2, 4)]))
"""


@pytest.mark.slow
def test_ranks_share_a_whole_model_with_its_gradients_and_moments() -> None:
    """In a process of its own: another test may have made a process group of one."""
    found = subprocess.run([sys.executable, "-c", RANKS], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    one, two, four = json.loads(found)
    for name in ("weights", "adapters", "optimizer"):
        assert one[name] == pytest.approx(2 * two[name], rel=1e-3) == pytest.approx(4 * four[name], rel=1e-3), name
    # A rank puts the layers together that are at work, and there are no more of them with more ranks.
    assert two["activations"] == four["activations"] >= one["activations"] and two["work"] == four["work"] > 0


def test_a_model_whose_layers_differ_is_measured_whole() -> None:
    setting = tiny(4)
    setting.model.layer_types = ["full_attention", "sliding_attention"] * 2
    setting.model.sliding_window = 8
    assert vars(predict(setting)) == pytest.approx(vars(measure(setting, 4)), rel=1e-9)


def test_weights_adapters_and_optimizer_are_what_their_sizes_say() -> None:
    """Of one layer of width 64: q and o, k and v, gate, up and down; two norms of the layer and two of the heads."""
    found = predict(tiny(1, tokens=32))
    square, narrow, wide = 64 * 64, 64 * 32, 64 * 128
    layer = 2 * square + 2 * narrow + 3 * wide + 2 * 64 + 2 * 16
    # Embedding, head and last norm; and a few buffers.
    assert found.weights == pytest.approx(4 * (layer + 2 * 500 * 64 + 64), abs=200)
    adapter = 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    # Four bytes; weights and gradients, as much again for both moments; of two runs.
    assert found.adapters == found.optimizer == 4 * 2 * 2 * adapter


def test_several_gpus_share_the_weights_and_nothing_else() -> None:
    alone, shared = predict(tiny()), predict(tiny(num_ranks=4))
    assert alone.weights / 4 < shared.weights < alone.weights
    assert replace(shared, weights=0) == replace(alone, weights=0)


def test_what_fits_fits_and_a_little_more_does_not() -> None:
    setting = tiny(1)
    memory = predict(setting)
    usable = 3 * memory.peak
    runs = most_runs(setting, memory, usable)
    assert predict(replace(setting, num_runs=runs)).peak <= usable * 1.02
    assert predict(replace(setting, num_runs=runs + 10)).peak > usable
    tokens = most_tokens(setting, memory, 20 * memory.peak)
    assert predict(replace(setting, tokens=tokens)).peak <= 20 * memory.peak
    assert predict(replace(setting, tokens=tokens + 3 * TOKENS_STEP)).peak > 20 * memory.peak
    assert most_tokens(setting, memory, memory.weights) == 0 == most_runs(setting, memory, memory.weights)


def test_one_gpu_for_both_leaves_a_cache_or_is_refused() -> None:
    setting = tiny(1, dtype=torch.bfloat16)
    memory = predict(setting)
    found = split(setting, memory, 24.0, num_adapters=8)
    assert found is not None and 0.9 < found.gpu_memory_utilization < 1 and found.kv_cache_tokens > 1000
    assert split(setting, memory, 1.5, num_adapters=8) is None


def test_the_shapes_are_those_of_the_models() -> None:
    billions = {"qwen3-0.6b": 0.596, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19}
    billions |= {"llama3.2-1b": 1.236, "llama3.2-3b": 3.213, "smollm2-135m": 0.1345}
    assert billions.keys() == SHAPES.keys()
    for name, expected in billions.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config(name))
        assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(expected, rel=0.005), name


DOCUMENT = (ROOT / "docs/training.md").read_text()
MOST_GIB = {"0.6B, 1 x 16,384": 4.5, "4B, 1 x 16,384": 15.0, "8B, 1 x 16,384": 26.0, "8B, 4 x 2,048": 22.0}
ROW = re.compile(r"^\| (Qwen3-)(.*B, (\d) x ([\d,]+)) \| (.*) \|$", re.M)


ROWS = ROW.findall(DOCUMENT)


@pytest.mark.parametrize("row", [ROWS[0], *in_full(*((row,) for row in ROWS[1:]))], ids=lambda row: row[1])
def test_real_models_fit_and_the_documents_have_the_figures(row: tuple[str, ...]) -> None:
    family, name, num_rows, row_tokens, figures = row
    seq_len = int(row_tokens.replace(",", ""))
    memory = real((family + name.partition(",")[0]).lower(), seq_len, int(num_rows) * seq_len)
    *sizes, _offloaded = vars(memory).values()
    assert [f"{value / GIB:.2f}" for value in (*sizes, memory.peak)] == figures.split(" | ")
    # Beyond the weights and gradients of the adapters themselves, and their moments.
    assert (memory.peak - memory.adapters - memory.optimizer) / GIB <= MOST_GIB.get(name, 80.0)


@pytest.mark.slow
def test_the_documents_have_what_offload_saves() -> None:
    seq_len = 16_384
    setting = Setting(model_config("qwen3-8b"), torch.bfloat16, LoRAConfig(), 8, seq_len, seq_len, True, True, True)
    found = predict(setting)
    shown = re.search(r"keeps (.*) GiB on the GPU and (.*) GiB on the host, and its peak is (.*) GiB", DOCUMENT)
    sizes = found.activations, found.offloaded, found.peak
    assert shown and tuple(f"{size / GIB:.2f}" for size in sizes) == shown.groups()


@pytest.mark.slow
def test_the_documents_have_what_is_kept_without_checkpointing() -> None:
    plain = Setting(model_config("qwen3-8b"), torch.bfloat16, LoRAConfig(), 8, 2048, 8192, False, True)
    shown = re.search(r"keeps (\S*) GiB; with `activation_checkpointing = \"mlp\"`.*\n *keeps (\S*) GiB", DOCUMENT)
    sizes = predict(plain).activations, predict(replace(plain, lean_mlps=True)).activations
    assert shown and tuple(f"{size / GIB:.2f}" for size in sizes) == shown.groups()


@pytest.mark.slow
def test_the_documents_have_what_a_group_takes() -> None:
    tokens = 512 + 16 * 1024, 16 * 1536
    ours, apart = (
        Setting(model_config("qwen3-4b"), torch.bfloat16, LoRAConfig(), 8, 2048, num, True, True) for num in tokens
    )
    shown = re.search(r"is ([\d,]+) of them, .* at most (\S+) GiB; .* it is ([\d,]+),\nand (\S+) GiB", DOCUMENT)
    peaks = (predict(each).peak / GIB for each in (ours, replace(apart, shares=False)))
    assert shown and shown.groups() == tuple(
        cell for num, peak in zip(tokens, peaks, strict=True) for cell in (f"{num:,}", f"{peak:.2f}")
    )


def test_the_documents_have_the_models_that_matter() -> None:
    assert {row[1] for row in ROW.findall(DOCUMENT)} >= MOST_GIB.keys()


TABLES = re.findall(r"```\nprl fit FLAGS (.*)\n```\n\n\| FLAGS \| (.*) \|\n\|[-|]+\n((?:\| .*\n)+)", DOCUMENT)
ONE_BY_ONE = """
import sys
from prime_rl.trainer.fit import main
for line in sys.stdin:
    assert main([*line.split(), "--json"]) == 0, line
"""


@pytest.mark.release
@pytest.mark.parametrize(("common", "columns", "rows"), TABLES, ids=["one GPU", "eight GPUs", "laptop"])
def test_the_documents_have_what_prl_fit_answers(common: str, columns: str, rows: str) -> None:
    """In a process of its own: another test may have made a process group of one."""
    table = [line.strip("| ").split(" | ") for line in rows.splitlines()]
    flags = "".join(f"{cells[0].strip('`')} {common}\n" for cells in table)
    argv = [sys.executable, "-c", ONE_BY_ONE]
    answers = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True, input=flags).stdout
    found = [json.loads(line) for line in answers.splitlines()]
    assert [[shown(name, answer[name]) for name in columns.split(" | ")] for answer in found] == [
        cells[1:] for cells in table
    ]


def shown(name: str, value: float) -> str:
    return f"{value:.2f}" if name.endswith(("_gib", "_utilization")) else f"{value:,}"


def test_the_documents_have_a_table_for_each_kind_of_machine_and_the_chunks_of_the_head() -> None:
    assert [len(rows.splitlines()) for _, _, rows in TABLES] == [5, 4, 3]
    chunks = re.findall(r"^\| ([\d,]+) \| ([\w ]+) \| ([\d,]+) \|$", DOCUMENT, re.M)
    assert [family for _, family, _ in chunks] == ["Qwen3", "Llama 3", "SmolLM2"]
    vocabularies = {str(shape["vocab_size"]) for shape in SHAPES.values()}
    assert {vocabulary.replace(",", "") for vocabulary, _, _ in chunks} == vocabularies
    for vocabulary, _, tokens in chunks:
        assert f"{CHUNK_BYTES // (4 * int(vocabulary.replace(',', ''))):,}" == tokens


@pytest.mark.slow
def test_more_runs_cost_their_own_bytes_and_nothing_else() -> None:
    setting = Setting(model_config("qwen3-0.6b"), torch.bfloat16, LoRAConfig(), 8, 256, 16_384, True, True)
    few, many = (measure(replace(setting, num_runs=num_runs), 2) for num_runs in (8, 64))
    assert (many.adapters, many.optimizer) == (8 * few.adapters, 8 * few.optimizer)
    # Beside them runs with a row have the gradients of the pass, and a layer that is at work has its adapters once
    # more, in the type that it computes in.
    gradients = (many.adapters - few.adapters) / 2
    growth = (many.peak - many.adapters - many.optimizer) - (few.peak - few.adapters - few.optimizer)
    whole_model = predict(setting)
    assert growth <= gradients + 0.03 * (whole_model.peak - whole_model.adapters - whole_model.optimizer)


@pytest.mark.parametrize(("rank", "dtype"), [(4, torch.bfloat16), (8, torch.float32), *in_full((8, torch.bfloat16))])
def test_packed_rows_of_any_rank_and_type_are_predicted(rank: int, dtype: torch.dtype) -> None:
    """A kernel for uneven groups has limits; without it their products need no tables."""
    loop, found = (
        predict(replace(tiny(1, packs=True), lora=LoRAConfig(rank=rank), dtype=dtype, num_runs=num_runs))
        for num_runs in (1, 2)
    )
    assert found.peak > loop.peak


def test_runs_without_a_row_cost_their_own_bytes() -> None:
    two, sixteen = (predict(tiny(1, tokens=64, num_runs=num_runs)) for num_runs in (2, 16))
    assert (sixteen.adapters, sixteen.optimizer) == (8 * two.adapters, 8 * two.optimizer)


def test_a_folder_comes_before_a_shape_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(2).model.save_pretrained(tmp_path / "qwen3-8b")
    monkeypatch.chdir(tmp_path)
    assert model_config("qwen3-8b").num_hidden_layers == 2


def test_an_unknown_model_is_named_with_the_shapes() -> None:
    with pytest.raises(UnknownModel, match=r"nope not found: .*qwen3-0\.6b"):
        model_config("nope")


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ([], "no model: name one with --model NAME"),
        (["--model", "nope"], "nope not found"),
        (["@", "/nowhere.toml"], "not found: /nowhere.toml"),
        (["--model", "qwen3-0.6b", "--trainer.devise", "cpu"], "trainer.devise: unknown"),
        (["--model", "qwen3-0.6b", "--full-finetune", "--rank", "4"], "remove [lora]"),
        (["--model", "qwen3-0.6b", "--full-finetune", "--runs", "2"], "must be 1 (or omitted) with full_finetune"),
        (["--model", "qwen3-0.6b", "--runs", "many"], "--runs: invalid value 'many': must be a whole number, or auto"),
        (["--model", "qwen3-0.6b", "--runs", "0"], "max_concurrent_runs: found 0: must be 1 to 1024, or 'auto'"),
        (["--model", "qwen3-0.6b", "--gpus", "0"], "--gpus 0: must be 1 or more, or all"),
        (["--model", "qwen3-0.6b", "--gpu-memory", "-1"], "--gpu-memory -1: must be above 0"),
        (["--model", "qwen3-0.6b", "--lora.target_modules", "['c_attn']"], "match no linear layer"),
    ],
)
def test_wrong_use_is_told_in_one_line(argv: list[str], problem: str, capsys: Any) -> None:
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("prl fit: ") and problem in error and error.count("\n") == 1


def test_auto_is_slots_and_tokens_that_fit(tmp_path: Path, capsys: Any) -> None:
    tiny(1).model.save_pretrained(tmp_path)
    argv = ["--model", str(tmp_path), "--seq-len", "2048", "--runs", "auto", "--tokens", "auto", "--gpu-memory"]
    argv[:0] = ["--trainer.device", "cpu"]
    assert cli.main([*argv, "2.3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 1 < found["runs"] <= MOST_AUTO_SLOTS and found["seq_len"] <= found["tokens"] < MOST_TOKENS
    assert found["peak_gib"] <= found["usable_gib"] / 2, "the trainer has half of a CPU's memory"


@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_full(torch.float32)])
def test_inference_has_room_for_all_versions_of_a_run_and_as_much_for_its_cache(dtype: torch.dtype) -> None:
    setting = tiny(1, tokens=32, dtype=dtype)
    memory = predict(setting)
    adapter = dtype.itemsize * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    versions, runs = 3, 5
    enough = memory.weights + 2 * adapter * (versions * runs + 1)  # one is that of a chat
    assert most_served(setting, memory, enough, versions) == runs
    assert most_served(setting, memory, enough - 9, versions) == runs - 1
    assert most_served(setting, memory, 0.0, versions) == 1
    # A model that is trained is served in the type that it computes in, and whole, by however many ranks it is trained.
    trained = whole(1, tokens=32, dtype=dtype, host_copies=4)
    assert served_bytes(trained, predict(trained)) == pytest.approx(memory.weights, rel=0.01)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model of one layer, which is measured in a moment."""
    folder = tmp_path_factory.mktemp("small")
    tiny(1).model.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_full_fine_tuning_has_its_own_words_and_one_run(small: str, capsys: Any) -> None:
    argv = ["--model", small, "--full-finetune", "--runs", "auto", "--seq-len", "64", "--gpu-memory", "8"]
    assert cli.main(argv) == 0
    table = capsys.readouterr().out
    assert "all weights trained" in table and "  gradients " in table and "adapters" not in table
    assert re.search(r"most runs with this pass +1$", table, re.M)


def test_the_table_and_the_json_tell_the_same(small: str, capsys: Any) -> None:
    argv = ["--model", small, "--seq-len", "64", "--tokens", "128", "--runs", "2", "--gpu-memory", "1.6"]
    assert cli.main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("version") == 1 and found["tokens"] == 128
    check(found, OUTPUTS["prl fit"], "prl fit")
    assert cli.main(argv) == 0
    table = capsys.readouterr().out
    assert "1 GPU of 2 GiB" in table
    for name in ("weights", "adapters", "optimizer", "head", "peak"):
        assert f"{found[f'{name}_gib']:.2f} GiB" in table, name
    assert f"{found['max_tokens_per_micro_batch']:,} tokens" in table
    assert "does not fit" in table and found["gpu_memory_utilization"] is None


@pytest.mark.slow
def test_offload_is_counted_on_a_gpu_and_shown(small: str, capsys: Any) -> None:
    argv = ["--model", small, "--seq-len", "64", "--tokens", "65536", "--runs", "2", "--gpu-memory", "16"]
    argv += ["--trainer.model.activation_offload", "true"]
    assert cli.main([*argv, "--json"]) == 0
    on_gpu = json.loads(capsys.readouterr().out)
    # The input of the layer, 65,536 x 64 in bfloat16.
    assert on_gpu["offloaded_gib"] == round(65_536 * TINY["hidden_size"] * 2 / GIB, 3) > 0
    assert cli.main(argv) == 0
    assert re.search(rf"saved in host memory +{on_gpu['offloaded_gib']:.2f} GiB", capsys.readouterr().out)
    model = TrainerModelConfig(name=small, lora=LoRAConfig(), activation_offload=True)
    on_cpu = setting_of(TrainerConfig(model=model), "cpu", 1)
    assert on_cpu.checkpoints and not on_cpu.offloads, "a CPU's memory is the host's"


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as wide as people's, with fewer layers: all figures are straight lines over them."""
    folder = tmp_path_factory.mktemp("shallow")
    config = model_config("smollm2-135m")
    config.num_hidden_layers = 8
    config.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("checkpoints", "tokens", "runs"), [(False, 1024, 4), *in_release((True, 1024, 8))])
def test_the_real_peak_on_a_cpu_is_what_was_predicted(shallow: Path, checkpoints: bool, tokens: int, runs: int) -> None:
    """A pass large enough that what libraries take for themselves does not count."""
    took = real_peak(shallow, tokens, runs, checkpoints)
    setting = Setting(model_config(str(shallow)), torch.float32, LoRAConfig(), runs, ROW_TOKENS, tokens, checkpoints)
    setting = replace(setting, reuses_blocks=True)
    assert took == pytest.approx(predict(setting).peak, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoints", "tokens", "host_copies"), [*in_release((False, 512, 0)), (True, 1024, HOST_COPIES)]
)
def test_the_real_peak_of_a_whole_model_is_what_was_predicted(
    shallow: Path, checkpoints: bool, tokens: int, host_copies: int
) -> None:
    took = real_peak(shallow, tokens, 0, checkpoints, host_copies)
    setting = whole(8, model=model_config(str(shallow)), seq_len=ROW_TOKENS, tokens=tokens, checkpoints=checkpoints)
    setting = replace(setting, host_copies=host_copies, reuses_blocks=True)
    assert took == pytest.approx(predict(setting).peak, rel=0.15)


def real_peak(model: Path, tokens: int, runs: int, checkpoints: bool, host_copies: int = 0) -> int:
    """Bytes."""
    argv = [str(model), *map(str, (ROW_TOKENS, tokens, runs, checkpoints, host_copies))]
    done = warm("tests.fit_main").run(argv, env=os.environ, cwd=ROOT, timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
