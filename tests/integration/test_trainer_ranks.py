"""Several ranks as one trainer: same adapters as one rank, equal on all ranks, and none waits for a dead one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prime_rl.contract.layout import RunDir
from prime_rl.contract.samples import read_ratios
from prime_rl.contract.types import read_batch
from tests.patience import PATIENCE_S
from tests.ranks_main import (
    NUM_STEPS,
    ROOMY,
    RUNS,
    SHORT_TIMEOUT_S,
    TIGHT,
    put_groups,
    put_run,
    put_whole_run,
    tight_config,
)
from tests.trainer_support import (
    adapter,
    published,
    relative_difference,
    tiny_model,
    train_until,
    trainer_config,
    whole_config,
)
from tests.warm import ROOT, warm

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]
TOLERANCE = 1e-4
Adapters = dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All groups of ranks went through their scenarios in here."""
    folder = tmp_path_factory.mktemp("ranks")
    main = warm("tests.managers_main")
    result = main.run(["ranks", str(folder)], env=os.environ, cwd=ROOT, timeout_s=PATIENCE_S)
    assert result.returncode == 0, f"{result.stderr}\n{logs(folder)}"
    return folder


def logs(folder: Path) -> str:
    return "\n".join(f"{path}:\n{path.read_text()}" for path in sorted(folder.rglob("*_[0-9].log")))


def codes(folder: Path, name: str) -> list[int]:
    result: list[int] = json.loads((folder / f"codes_{name}.json").read_text())
    return result


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """The last adapter of each run when it had a trainer of one rank for itself."""
    adapters = {}
    for run_id in RUNS:
        workspace = tmp_path_factory.mktemp(run_id)
        run = put_run(workspace, folder / "model", run_id)
        train_until(tight_config(workspace, folder / "model"), lambda run=run: published(run) == NUM_STEPS)
        adapters[run_id] = adapter(run, NUM_STEPS)
    return adapters


def check(workspace: Path, alone: Adapters, run_ids: list[str]) -> None:
    for run_id in run_ids:
        assert relative_difference(adapter(RunDir(workspace / run_id), NUM_STEPS), alone[run_id]) <= TOLERANCE, run_id


@pytest.mark.parametrize("size", [2, 4])
def test_a_group_ends_as_it_should(folder: Path, size: int) -> None:
    assert codes(folder, str(size)) == [0] * size, logs(folder)
    assert "Warning" not in logs(folder)


@pytest.mark.numeric
@pytest.mark.parametrize("size", [2, 4])
def test_many_ranks_reach_what_one_rank_and_one_run_reach(folder: Path, alone: Adapters, size: int) -> None:
    check(folder / f"together_{size}", alone, list(RUNS))


def computed(run: RunDir) -> list[int]:
    lines = run.trainer_metrics.read_text().splitlines()
    return [json.loads(line)["tokens/computed"] for line in lines]


@pytest.mark.numeric
def test_prompts_that_many_ranks_compute_once_train_as_those_that_one_computes_for_each(
    folder: Path, tmp_path: Path
) -> None:
    runs = put_groups(tmp_path, folder / "model")
    padded = trainer_config(tmp_path, folder / "model", **TIGHT | ROOMY, model={"packed_rows": False})
    train_until(padded, lambda: all(published(run) == NUM_STEPS for run in runs))
    for run in runs:
        for size in (2, 4):
            other = RunDir(folder / f"groups_{size}" / run.run_id)
            assert relative_difference(adapter(other, NUM_STEPS), adapter(run, NUM_STEPS)) <= TOLERANCE, size
            assert all(few < many for few, many in zip(computed(other), computed(run), strict=True)), size
        # In sixteen bits a row depends on what is beside it: the same path, not the same numbers.
        rounded = RunDir(folder / "groups_bf16_2" / run.run_id)
        assert computed(rounded) == computed(RunDir(folder / "groups_2" / run.run_id))
        assert grad_norms(rounded) == pytest.approx(grad_norms(run), rel=0.25)


@pytest.mark.numeric
def test_the_figures_of_texts_are_those_of_all_ranks(folder: Path, tmp_path: Path) -> None:
    run = put_run(tmp_path, folder / "model", "run_texts")
    train_until(tight_config(tmp_path, folder / "model"), lambda: published(run) == NUM_STEPS)
    names = ("loss", "mismatch_kl", "supervised/loss", "supervised/accuracy", "held_out/loss", "held_out/accuracy")
    for name in names:
        one, *several = (
            [json.loads(line)[name] for line in each.trainer_metrics.read_text().splitlines()]
            for each in (run, *(RunDir(folder / f"together_{size}" / "run_texts") for size in (2, 4)))
        )
        assert all(values == pytest.approx(one, rel=1e-3, abs=1e-6) for values in several), name


@pytest.mark.parametrize("run_id", RUNS)
def test_the_kept_ratios_of_all_ranks_come_together(folder: Path, run_id: str) -> None:
    two, four = (read_ratios(RunDir(folder / f"together_{size}" / run_id).ratios)[1] for size in (2, 4))
    samples = read_batch(RunDir(folder / "together_2" / run_id).rollout_file(1)).samples[:4]
    assert {place: len(values) for place, values in two.items()} == {
        place: sum(sample.loss_mask) for place, sample in enumerate(samples)
    }
    assert two.keys() == four.keys()
    for place, values in two.items():
        assert values == pytest.approx(four[place], abs=1e-3)


def test_an_eviction_in_the_middle_of_a_batch_and_a_reused_slot_harm_no_other_run(
    folder: Path, alone: Adapters
) -> None:
    workspace = folder / "evicted_2"
    check(workspace, alone, ["run_adamw", "run_muon"])
    assert 1 <= published(RunDir(workspace / "run_0")) < 30


def test_a_run_that_was_paused_and_continued_reaches_what_it_reaches_undisturbed(folder: Path, alone: Adapters) -> None:
    """On two ranks, and its neighbour too: both let it go after the same update, which is saved."""
    workspace = folder / "paused_2"
    (left,) = json.loads((workspace / "left.json").read_text())
    assert 1 <= left < NUM_STEPS
    assert (RunDir(workspace / "run_adamw").checkpoint_dir(left) / "STABLE").exists()
    check(workspace, alone, ["run_adamw", "run_sgd"])


@pytest.mark.parametrize(
    ("scenario", "size"), [("together", 2), ("together", 4), ("evicted", 2), ("paused", 2), ("half", 4), ("whole", 2)]
)
def test_adapters_are_equal_on_all_ranks_and_the_base_is_shared_out(folder: Path, scenario: str, size: int) -> None:
    holdings = [json.loads(path.read_text()) for path in (folder / f"{scenario}_{size}").glob("rank_*.json")]
    assert len(holdings) == size
    assert len({rank["adapters"] for rank in holdings}) == 1
    assert {rank["base_all"] for rank in holdings} == {rank["base_here"] * size for rank in holdings}


def test_what_two_ranks_saved_is_gone_on_with_by_four_and_by_one(folder: Path, alone: Adapters) -> None:
    check(folder / "half_4", alone, list(RUNS))
    workspace = folder / "half_1"
    runs = [RunDir(workspace / run_id) for run_id in RUNS]
    assert {published(run) for run in runs} == {NUM_STEPS // 2}
    train_until(tight_config(workspace, folder / "model"), lambda: all(published(run) == NUM_STEPS for run in runs))
    check(workspace, alone, list(RUNS))


def grad_norms(run: RunDir) -> list[float]:
    return [json.loads(line)["grad_norm"] for line in run.trainer_metrics.read_text().splitlines()]


@pytest.mark.numeric
def test_the_whole_model_is_trained_by_many_ranks_as_by_one(folder: Path, tmp_path: Path) -> None:
    """Also when four or one go on with what two saved."""
    model = folder / "model"
    run = put_whole_run(tmp_path, model)
    train_until(whole_config(tmp_path, model, **TIGHT), lambda: published(run) == NUM_STEPS)
    alone = load_file(run.broadcast_dir(NUM_STEPS) / "model.safetensors")
    gone_on = RunDir(folder / "whole_half_1" / "run_a")
    train_until(whole_config(gone_on.path.parent, model, **TIGHT), lambda: published(gone_on) == NUM_STEPS)
    for name in ("whole_2", "whole_half_4", "whole_half_1"):
        workspace = RunDir(folder / name / "run_a")
        ours = load_file(workspace.broadcast_dir(NUM_STEPS) / "model.safetensors")
        assert relative_difference(ours, alone) <= TOLERANCE, name
        assert (workspace.broadcast_dir(NUM_STEPS // 2) / "STABLE").exists(), name
        # Neither Adam nor clipping would show a gradient that is a mean over ranks instead of a sum.
        assert grad_norms(workspace) == pytest.approx(grad_norms(run), rel=TOLERANCE), name
    base = dict(tiny_model().named_parameters())
    assert relative_difference(alone, {name: base[name].detach() for name in alone}) > 1e-2


@pytest.mark.parametrize(("name", "size", "victim"), [("busy", 4, 2), ("idle", 2, 0)])
def test_a_rank_that_is_killed_is_named_by_the_others_and_they_end(
    folder: Path, name: str, size: int, victim: int
) -> None:
    expected = [1] * size
    expected[victim] = -9
    assert codes(folder, name)[:size] == expected, logs(folder / name)
    for rank in set(range(size)) - {victim}:
        told = (folder / name / f"rank_{rank}.log").read_text()
        sentence = f"trainer: no heartbeat from rank {victim} of {size} for {SHORT_TIMEOUT_S:g} s\n"
        assert sentence in told and "Traceback" not in told, told


def test_ranks_that_are_started_again_in_the_same_store_train_on(folder: Path) -> None:
    assert codes(folder, "idle")[2:] == [0, 0], logs(folder / "idle")
    assert published(RunDir(folder / "idle" / "run_a")) == 2
