from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fork_runner import Runner, runner
from tests.system_support import Workspace, build_base_model, build_number_model, make_whole_workspace, make_workspace


def _once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """One for all workers: the first that needs it makes it, the others wait for that (ONCE in tests/conftest.py).

    In the folder PRL_TEST_MODELS, where that is set: for several runs of the tests.
    """
    place = tmp_path_factory.getbasetemp()
    shared = os.environ.get("PRL_TEST_MODELS") or (place.parent if "PYTEST_XDIST_WORKER" in os.environ else place)
    folder = Path(shared) / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "config.json").exists():
            make(folder)
    return folder


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Knows the form of the tasks."""
    return _once(tmp_path_factory, "base", build_base_model)


@pytest.fixture(scope="session")
def number_model(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    """Can say numbers."""
    return _once(tmp_path_factory, "numbers", lambda folder: build_number_model(base_model, folder))


@pytest.fixture(scope="session")
def lives() -> Iterator[Runner]:
    """Trainers in children that cost a moment each and may be killed."""
    with runner() as started:
        yield started


def _closed(workspace: Workspace) -> Iterator[Workspace]:
    yield workspace
    workspace.prl("down", check=False)
    for process in workspace.processes():
        process.kill()


@pytest.fixture
def workspace(tmp_path: Path, base_model: Path) -> Iterator[Workspace]:
    """A workspace with two slots and the embedded engine; whatever a test leaves running is ended."""
    yield from _closed(make_workspace(tmp_path, base_model))


@pytest.fixture
def vllm_workspace(tmp_path: Path, base_model: Path) -> Iterator[Workspace]:
    yield from _closed(make_workspace(tmp_path, base_model, engine="vllm"))


@pytest.fixture
def whole_workspace(request: pytest.FixtureRequest, tmp_path: Path, base_model: Path) -> Iterator[Workspace]:
    """A workspace that fine-tunes the whole model; its parameter is (engine, broadcast.type)."""
    engine, broadcast = request.param
    yield from _closed(make_whole_workspace(tmp_path, base_model, engine=engine, broadcast=broadcast))


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
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The last adapter of each of the isolation tests' runs when it had the trainer for itself."""
    from tests.isolation_support import RUNS, train_alone

    return {run_id: train_alone(tmp_path_factory.mktemp(run_id), tiny, run_id) for run_id in RUNS}
