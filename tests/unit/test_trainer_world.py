"""The process group of one, a device that is not there, and how a silent rank is found."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.contract.files import wait_for
from prime_rl.trainer.world import LEFT, Liveness, Pulse, WorldError, name_of_this_start, setup_world
from tests.patience import PATIENCE_S
from tests.trainer_support import solo_world


def test_a_process_alone_is_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = solo_world()
    # On a GPU the first collective would set NCCL up.
    monkeypatch.setattr(torch.distributed, "all_reduce", None)
    assert (world.rank, world.size, world.is_master) == (0, 1, True)
    assert world.sum(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    world.store.set("key", "value")
    assert world.store.get("key") == b"value"


@pytest.mark.parametrize("given", ["", "max_split_size_mb:64"])
def test_the_allocator_is_set_up_before_torch_is_loaded_unless_a_person_did(given: str, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTORCH_ALLOC_CONF": given}
    if not given:
        del environ["PYTORCH_ALLOC_CONF"]
    (tmp_path / "trainer.toml").write_text(f'output_dir = "{tmp_path}"\nmodel = {{ name = "base", lora = {{}} }}\n')
    program = (
        "import os, sys, prime_rl.trainer.train as train\n"
        "def load():\n    sys.exit(f\"{os.environ['PYTORCH_ALLOC_CONF']} {'torch' in sys.modules}\")\n"
        f"train.heavy_imports = load\ntrain.main(['@', {str(tmp_path / 'trainer.toml')!r}])\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.stderr == f"{given or 'expandable_segments:True'} False\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_device_is_named() -> None:
    with pytest.raises(WorldError, match="no CUDA device; set device = 'cpu'"):
        setup_world("cuda", 1.0)


def test_silent_ranks_are_lost_and_those_that_left_are_not() -> None:
    now = [0.0]
    pulse = Pulse(4, clock=lambda: now[0])
    pulse.update(["1", "1", "1", "1"])
    now[0] = 6.0
    pulse.update(["2", "1", LEFT, "2"])
    assert pulse.lost(10.0) == [] and pulse.lost(6.0) == [1]
    now[0] = 12.0
    pulse.update(["3", "1", LEFT, "2"])
    assert pulse.lost(10.0) == [1] and pulse.lost(6.0) == [1, 3] and not pulse.all_left
    pulse.update([LEFT, LEFT, LEFT, LEFT])
    now[0] = 99.0
    assert pulse.all_left and pulse.lost(1.0) == []


def test_a_rank_that_is_missed_ends_the_process_and_one_that_leaves_does_not() -> None:
    store = HashStore()
    ends: list[str] = []

    def rank(number: int) -> Liveness:
        return Liveness(store, number, 3, timeout_s=2.0, stop=lambda: False, end=ends.append)

    here, leaving, _dead = rank(0), rank(1), rank(2)
    here.start()
    leaving.start()
    assert leaving.leave() is None
    wait_for(lambda: bool(ends), "rank 2 to be missed", timeout_s=PATIENCE_S)
    assert ends == ["no heartbeat from rank 2 of 3 for 2 s"]
    assert here.explain() == here.leave() == ends[0]


def test_every_start_has_a_name_of_its_own_in_one_store() -> None:
    """Each start finds the words of the one before it."""
    store = HashStore()
    starts: list[set[str]] = []
    for _ in range(3):
        names: list[str] = []

        def join(rank: int, names: list[str] = names) -> None:
            names.append(name_of_this_start(store, rank, 3, PATIENCE_S))

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(names) == 3 and len(set(names)) == 1
        starts.append(set(names))
    assert len(set.union(*starts)) == 3


def test_a_rank_that_does_not_come_is_named() -> None:
    store = HashStore()
    store.set("key/2", "what an earlier start left")
    with pytest.raises(WorldError, match=r"rank 1 and 2 of 3 did not join within 0\.2 s"):
        name_of_this_start(store, 0, 3, 0.2)
    with pytest.raises(WorldError, match=r"rank 0 did not join within 0\.2 s; rank 1 waits for it"):
        name_of_this_start(store, 1, 3, 0.2)


@pytest.mark.parametrize(
    ("model", "device_type", "numbers"),
    [
        ({}, "cpu", "float32 on cpu"),
        ({}, "cuda", "bfloat16 on cuda"),
        ({"dtype": "float32"}, "cuda", "float32 on cuda"),
        ({"dtype": "float32", "tf32": True}, "cuda", "float32 on cuda, multiplied in TF32"),
        ({"tf32": True}, "cuda", "bfloat16 on cuda"),
    ],
)
def test_numbers_are_cut_to_tf32_only_where_a_config_asks_for_it(
    model: dict[str, object], device_type: str, numbers: str
) -> None:
    assert TrainerModelConfig.model_validate(model).numbers_on(device_type) == numbers
