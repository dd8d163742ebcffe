"""Where an API key may come from, and what is said when it may not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.configs.base import ConfigError, build
from prime_rl.configs.orchestrator import ClientConfig
from prime_rl.utils.secrets import SecretError, handed_over, names_of, read_secret

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
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SecretError, match=r"has no valid key") as error:
        read_secret("K", {"K_FILE": str(file)})
    assert not text or text not in str(error.value)
    if text and "\x00" not in text:
        with pytest.raises(SecretError, match="K has no valid key"):
            read_secret("K", {"K": text})


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("none", "file not found: "), (".", "is not a file"), ("pipe", "is not a file")):
        with pytest.raises(SecretError, match=message):
            read_secret("K", {"K_FILE": str(tmp_path / name)})


@pytest.mark.parametrize("value", [f"http://u:{CANARY}@h/v1", [f"https://{CANARY}@h/v1", "http://b/v1"]])
def test_a_url_with_a_password_is_refused_without_showing_it(value: object) -> None:
    with pytest.raises(ConfigError, match="shown in logs: set api_key_var") as error:
        build(ClientConfig, {"base_url": value}, "orch.toml")
    assert CANARY not in str(error.value)
    assert build(ClientConfig, {"base_url": "http://h:1/v1@x"}, "").urls == ["http://h:1/v1@x"]


READ = """
import os, sys
from prime_rl.utils.secrets import handed_over, read_secret
if len(sys.argv) > 2:
    import subprocess
    with handed_over(os.environ, [sys.argv[1]]) as (environ, fds):
        subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1]], env=environ, pass_fds=fds, check=True)
else:
    print(read_secret(sys.argv[1], os.environ))
"""


def test_a_key_is_handed_on_from_process_to_process_and_is_in_no_environment(file: Path) -> None:
    ours = {**os.environ, "MY_KEY": CANARY, "PRL_API_KEY": CANARY + "-of-another", "PRL_API_KEY_FILE": str(file)}
    with handed_over(ours, ["MY_KEY"]) as (environ, fds):
        assert CANARY not in str(environ) and len(fds) == 1
        assert not {"MY_KEY", "PRL_API_KEY", "PRL_API_KEY_FILE"} & environ.keys()
        assert environ.items() <= {**ours, "MY_KEY_FILE": environ["MY_KEY_FILE"]}.items()
        for arguments in (["MY_KEY"], ["MY_KEY", READ]):  # a child, and a child's child
            command = [sys.executable, "-c", READ, *arguments]
            done = subprocess.run(command, env=environ, pass_fds=fds, capture_output=True, text=True, check=True)
            assert done.stdout.strip() == CANARY
        with handed_over(environ, []) as (others, other_fds):
            assert "MY_KEY_FILE" not in others and other_fds == [], "a process that does not need it cannot reach it"
    with handed_over({"K_FILE": str(file)}, ["K"]) as (environ, fds):
        assert (environ, fds) == ({"K_FILE": str(file)}, [])
