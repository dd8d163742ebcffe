"""A run that is paused or preempted in the middle of training reaches what it reaches undisturbed, and so do others."""

from __future__ import annotations

from pathlib import Path

from prime_rl.contract.layout import RunDir, list_steps
from prime_rl.trainer.runs import get_multi_run_manager
from tests.isolation_support import NUM_STEPS, Adapter, all_done, check, in_the_middle_of_its_batch, put_run
from tests.trainer_support import published, put_batches, train_until, trainer_config, write_run


def test_a_run_that_is_paused_amid_a_batch_goes_on_as_if_nothing_had_been(
    alone: dict[str, Adapter], tiny: Path, tmp_path: Path
) -> None:
    """Its neighbour too. Its weights are saved after its newest update, and its slot is free meanwhile."""
    paused, other = put_run(tmp_path, tiny, "run_adamw"), put_run(tmp_path, tiny, "run_sgd")
    seen: dict[str, int] = {}

    def done() -> bool:
        if "paused" not in seen and published(paused) >= 1 and in_the_middle_of_its_batch(paused):
            paused.paused.write_text("later")
            get_multi_run_manager().discover_runs()  # its event may come only after this batch
            seen["paused"] = get_multi_run_manager().run_of(paused.run_id).progress.step  # type: ignore[union-attr]
        if "paused" in seen and "left" not in seen and paused.run_id not in get_multi_run_manager().id_2_idx:
            seen["left"] = list_steps(paused.checkpoints, stable_only=True)[-1]
            assert seen["left"] == published(paused), "saved after its newest update"
        if "left" in seen and published(other) == NUM_STEPS:
            paused.paused.unlink(missing_ok=True)
        return all_done([paused, other])()

    train_until(trainer_config(tmp_path, tiny, max_tokens_per_micro_batch=64), done)
    assert seen["left"] == seen["paused"] + 1, "the batch that it was in was trained on first, and no other"
    check([paused, other], alone)


def test_a_preempted_run_comes_back_by_itself_and_goes_on_as_if_nothing_had_been(
    alone: dict[str, Adapter], tiny: Path, tmp_path: Path
) -> None:
    low, high = put_run(tmp_path, tiny, "run_adamw"), put_run(tmp_path, tiny, "run_muon")
    urgent = RunDir(tmp_path / "run_urgent")
    order: list[str] = []

    def done() -> bool:
        if not urgent.path.exists() and published(low) >= 1:
            write_run(tmp_path, urgent.run_id, tiny, max_steps=3, priority=2, preempt=True)
            put_batches(urgent, 3)
            get_multi_run_manager().discover_runs()  # its event may come only after many batches
        if urgent.path.exists():
            held = " ".join(sorted(get_multi_run_manager().id_2_idx))
            order.extend([held] if [held] != order[-1:] else [])
        return all_done([low, high])()

    config = high.orch_toml.read_text()
    high.orch_toml.write_text(f"priority = 1\n{config}")
    train_until(trainer_config(tmp_path, tiny, max_concurrent_runs=2), done)
    assert "run_muon run_urgent" in order and order.index("run_muon run_urgent") > 0
    assert any("run_adamw" in held for held in order[order.index("run_muon run_urgent") :]), order
    assert published(urgent) == 3 and not low.preempted.exists()
    check([low, high], alone)
