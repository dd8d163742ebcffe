"""`python -m prime_rl.base_model` as a process: what it writes, and when it writes nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from prime_rl.base_model.__main__ import Progress, Recipe
from prime_rl.base_model.teach import Demonstrator, PromptEncoder, build_model, build_tokenizer, teach
from prime_rl.contract.files import wait_for
from prime_rl.utils.process import StopFlag
from prime_rl.utils.tasks import TASKS, similarity, split_of
from tests.budgets import in_release
from tests.patience import PATIENCE_S
from tests.warm import warm

COMMAND = [sys.executable, "-m", "prime_rl.base_model"]
NUM_STEPS = 2


def make_base(out: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return prl_make_base("--out", str(out), "--num_threads", "1", *args)


def prl_make_base(*args: str) -> subprocess.CompletedProcess[str]:
    return warm("prime_rl.base_model.__main__").run(args, env=os.environ, cwd=Path.cwd(), timeout_s=PATIENCE_S)


def make(out: Path) -> Path:
    done = make_base(out, "--steps", str(NUM_STEPS))
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def model(untaught_model: Path) -> Path:
    return untaught_model


def test_it_loads_and_generates(model: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert loaded.config.model_type == "qwen3" and loaded.dtype == torch.float32
    assert loaded.config.vocab_size == len(tokenizer)
    assert GenerationConfig.from_pretrained(model).eos_token_id == tokenizer.eos_token_id
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Copy: cab"}], add_generation_prompt=True, return_tensors="pt"
    )
    assert loaded.generate(**inputs, max_new_tokens=3, do_sample=False).shape[1] > inputs["input_ids"].shape[1]


def test_it_says_what_it_made(model: Path) -> None:
    manifest = json.loads((model / "base_model.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert manifest["num_parameters"] == sum(p.numel() for p in loaded.parameters())
    assert set(manifest["rewards"]) == set(TASKS)
    assert all(0.0 <= value <= 1.0 for skill in manifest["rewards"].values() for value in skill.values())
    assert {path.name for path in model.iterdir()} == {*manifest["files"], "base_model.json"}
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in model.iterdir() if path.name != "base_model.json")


@pytest.mark.release
def test_same_seed_same_bytes(model: Path, tmp_path: Path) -> None:
    first = (model / "model.safetensors").read_bytes()
    assert (make(tmp_path / "again") / "model.safetensors").read_bytes() == first


def test_the_same_recipe_teaches_the_same_bits() -> None:
    """In this process, with a model that is learned at once."""
    tokenizer = build_tokenizer(512)

    def taught(seed: int) -> list[torch.Tensor]:
        recipe = Recipe(seed=seed, num_steps=2, num_threads=1, hidden_size=32, num_layers=1, batch_size=4)
        torch.manual_seed(recipe.seed)
        model = build_model(recipe, tokenizer)
        teach(model, recipe, PromptEncoder(tokenizer), lambda step: None)
        return list(model.parameters())

    one, again, other = taught(0), taught(0), taught(1)
    assert all(map(torch.equal, one, again)) and not all(map(torch.equal, one, other))


def test_without_a_terminal_the_progress_is_a_line_each_ten_seconds_with_what_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now_s = 0.0
    with Progress(360, StopFlag(), lambda: now_s) as progress:
        for step in range(1, 361):
            now_s = 2.5 * step
            progress(step)
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "make-base: teaching a base model" and len(lines) == 90
    assert lines[0] == "make-base: step 4/360, 1%, about 15 min left"
    assert lines[-2] == "make-base: step 356/360, 99%, about 10 s left"
    assert lines[-1] == "make-base: step 360/360, 100%, about 0 s left"


def test_a_terminal_shows_a_bar_with_what_is_left_and_no_loss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss rises where demonstrations of mixed quality begin, which is no fault."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(4, StopFlag()) as progress:
        for step in range(1, 5):
            progress(step)
    shown = capsys.readouterr().err
    assert "0/4" in shown and "<" in shown and "loss" not in shown


def test_an_up_to_date_model_is_left_alone(model: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in model.iterdir()}
    done = make_base(model, "--steps", str(NUM_STEPS))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{model} is up to date\n", "")
    assert {path: path.stat().st_mtime_ns for path in model.iterdir()} == before


@pytest.mark.release
def test_a_damaged_model_is_made_again(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "base"
    shutil.copytree(model, out)
    whole = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(whole[:-1])
    assert (make(out) / "model.safetensors").read_bytes() == whole


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, *in_release(signal.SIGINT)])
def test_a_signal_leaves_nothing(tmp_path: Path, signum: int) -> None:
    out = tmp_path / "base"
    command = [*COMMAND, "--out", str(out), "--num_threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "teaching" in process.stderr.readline()
        process.send_signal(signum)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert stdout == "" and f"stopped by {signal.Signals(signum).name}; nothing was written" in stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "file"
    out.write_text("mine")
    check_refused(make_base(out), "not a folder")
    assert out.read_text() == "mine"


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    check_refused(make_base(tmp_path), "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_refused(make_base(tmp_path / "file" / "base"), "cannot be written")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    check_refused(make_base(tmp_path / "base"), "Permission denied")


def test_a_signal_while_it_loads_torch_ends_it_at_once(tmp_path: Path) -> None:
    command = [*COMMAND, "--out", str(tmp_path / "base")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        wait_for(lambda: "torch" in maps.read_text(encoding="utf-8"), "torch to be loaded", timeout_s=PATIENCE_S)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stdout) == (130, "") and not any(tmp_path.iterdir())
    assert stderr == "make-base: stopped by SIGINT; nothing was written\n", "it has taught nothing"


def check_refused(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert done.returncode == 1
    assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_wrong_use() -> None:
    for args, words in ((["--step", "3", "--out", "x"], "did you mean 'steps'"), ([], "out: required, but missing")):
        done = prl_make_base(*args)
        assert done.returncode == 2
        assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_every_setting_changes_the_digest() -> None:
    digest = Recipe().digest()
    assert Recipe().digest() == digest
    for changed in (Recipe(seed=1), Recipe(num_steps=1), Recipe(num_threads=1), Recipe(careless_share=0.0)):
        assert changed.digest() != digest


def test_demonstrations_are_right_first_and_of_mixed_quality_later() -> None:
    recipe = Recipe(batch_size=2000)

    def rewards(clean: bool) -> list[float]:
        found = []
        for demonstration in Demonstrator(recipe).batch(clean=clean):
            instruction, _, word = demonstration.prompt.partition(": ")
            (task,) = [task for task in TASKS.values() if task.instruction == instruction]
            assert split_of(word) == "train"
            found.append(similarity(demonstration.answer, task.solve(word)))
        return found

    clean, mixed = rewards(True), rewards(False)
    assert set(clean) == {1.0}
    assert 0.4 < sum(mixed) / len(mixed) < 0.6
