"""Where an API key may come from, and what is said when it may not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prime_rl.configs.base import ConfigError, build
from prime_rl.configs.orchestrator import ClientConfig
from prime_rl.utils.secrets import SecretError, names_of, read_secret

CANARY = "sk-canary-4711"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{CANARY}\n")
    path.chmod(0o600)
    return path


def test_a_key_comes_from_the_variable_or_from_its_file(file: Path) -> None:
    assert read_secret("K", {}) is None
    assert read_secret("K", {"K": CANARY}) == CANARY
    assert read_secret("K", {"K_FILE": str(file)}) == CANARY
    assert read_secret("K", {"K": "other", "K_FILE": str(file)}) == "other"
    assert read_secret("K", {"OTHER_FILE": str(file), "K": ""}) is None
    assert names_of("K") == ["K", "K_FILE"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o602, 0o666])
def test_a_file_that_others_may_read_is_refused_without_its_content(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(SecretError) as error:
        read_secret("K", {"K_FILE": str(file)})
    assert str(error.value) == f"K_FILE: {file} is readable by others (mode {mode:04o}): run chmod 600 {file}"


@pytest.mark.parametrize("text", ["", "two words", "a\nb", f"{CANARY}\x00", "ü", "x" * 5000])
def test_what_is_no_key_is_refused_without_its_content(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(SecretError, match=r"has no valid key") as error:
        read_secret("K", {"K_FILE": str(file)})
    assert not text or text not in str(error.value)
    if text and "\x00" not in text:
        with pytest.raises(SecretError, match="K has no valid key"):
            read_secret("K", {"K": text})


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("none", "No such file"), (".", "is not a file"), ("pipe", "is not a file")):
        with pytest.raises(SecretError, match=message):
            read_secret("K", {"K_FILE": str(tmp_path / name)})


@pytest.mark.parametrize("value", [f"http://u:{CANARY}@h/v1", [f"https://{CANARY}@h/v1", "http://b/v1"]])
def test_a_url_with_a_password_is_refused_without_showing_it(value: object) -> None:
    with pytest.raises(ConfigError, match="shown in logs: set api_key_var") as error:
        build(ClientConfig, {"base_url": value}, "orch.toml")
    assert CANARY not in str(error.value)
    assert build(ClientConfig, {"base_url": "http://h:1/v1@x"}, "").urls == ["http://h:1/v1@x"]
