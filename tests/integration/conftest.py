from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system_support import House, build_base_model, make_house


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base_model(tmp_path_factory.mktemp("models") / "base")


def _closed(house: House) -> Iterator[House]:
    yield house
    house.prl("down", check=False)
    for process in house.processes():
        process.kill()


@pytest.fixture
def house(tmp_path: Path, base_model: Path) -> Iterator[House]:
    """A house with two slots and the embedded engine; whatever a test leaves running is ended."""
    yield from _closed(make_house(tmp_path, base_model))


@pytest.fixture
def vllm_house(tmp_path: Path, base_model: Path) -> Iterator[House]:
    yield from _closed(make_house(tmp_path, base_model, engine="vllm"))
