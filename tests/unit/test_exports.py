"""Exports: what is written computes what the run's version computes, and appears complete or not at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from daemons import exports
from daemons.errors import ActionError
from daemons.exports import Export, export_run
from daemons.specs import MERGE_MODULE, save_devices, save_folder
from prime_rl.contract.files import mark_stable
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.trainer.merge import main as merge_main
from prime_rl.trainer.merge import merge_into
from tests.budgets import in_full
from tests.daemons_support import ROOT, RUN_TOML, in_this_process
from tests.inference_support import make_adapter, make_model

IDS = torch.arange(2, 34)[None]
# Of the largest logit. Merged or not, float32 sums differ in their last bits only.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture
def run(base: Path, tmp_path: Path) -> RunDir:
    """A run of two versions, with figures of three steps."""
    run = RunDir(tmp_path / "workspace" / "run_a")
    run.control.mkdir(parents=True)
    run.orch_toml.write_text(RUN_TOML.format(max_steps=3, model=base) + '[monitor.wandb]\nproject = "```"\n')
    run.broadcast.mkdir()
    for step in (1, 2):
        make_adapter(run.broadcast_dir(step), base, seed=step)
        mark_stable(run.broadcast_dir(step))
    run.metrics.mkdir()
    lines = [{"step": step, "time": 60.0 * step, "reward/mean": step / 4} for step in (1, 2, 3)]
    lines.append({"step": 2, "eval/reverse-text/pass@1": 0.75, "eval/reverse-text/pass@1_se": 0.1})
    run.orchestrator_metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def export(run: RunDir, out: Path, **options: Any) -> Export:
    return export_run(run.path.parent, run.run_id, out, **options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def with_adapter(base: Path, adapter: Path) -> torch.Tensor:
    return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))


def check_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())


def test_an_exported_adapter_is_the_one_that_was_published(run: RunDir, base: Path, tmp_path: Path) -> None:
    done = export(run, tmp_path / "adapter")
    assert (done.step, done.kind) == (2, "adapter")
    assert done.num_bytes == sum(path.stat().st_size for path in done.out.iterdir())
    expected = with_adapter(base, run.broadcast_dir(2))
    assert torch.equal(with_adapter(base, done.out), expected)
    assert not torch.allclose(expected, logits(AutoModelForCausalLM.from_pretrained(base)), atol=0.1)
    assert sorted(path.name for path in done.out.iterdir()) == [
        *("README.md", "adapter_config.json", "adapter_model.safetensors"),
    ]


@pytest.mark.parametrize("is_a_process", [False, *in_full(True)])
def test_a_merged_model_computes_what_the_adapter_computes(
    run: RunDir, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_a_process: bool
) -> None:
    """With what merges, which is a process of its own; read back by transformers, with its tokenizer."""
    if not is_a_process:
        monkeypatch.setattr(exports, "run_child", in_this_process(MERGE_MODULE, merge_main))
    done = export(run, tmp_path / "merged", step=1, merge=True)
    assert (done.step, done.kind) == (1, "merged")
    check_same(logits(AutoModelForCausalLM.from_pretrained(done.out)), with_adapter(base, run.broadcast_dir(1)))
    tokenizer = AutoTokenizer.from_pretrained(done.out)
    assert tokenizer.decode(tokenizer("abc").input_ids) == "abc" and tokenizer.chat_template


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_and_types_of_the_base_model_are_kept(run: RunDir, base: Path, tmp_path: Path, dtype: Any) -> None:
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    whole.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    shards = sorted(path.name for path in (tmp_path / "sharded").glob("*.safetensors"))
    out = tmp_path / "out"
    out.mkdir()
    merge_into(out, str(tmp_path / "sharded"), run.broadcast_dir(2))
    assert len(shards) > 2 and sorted(path.name for path in out.glob("*.safetensors")) == shards
    merged = AutoModelForCausalLM.from_pretrained(out)
    assert merged.dtype == dtype
    by_hand = PeftModel.from_pretrained(whole.float(), run.broadcast_dir(2)).merge_and_unload()
    for name, weight in merged.state_dict().items():
        check_same(weight.float(), by_hand.state_dict()[name].to(dtype).float())


def test_an_adapter_that_does_not_fit_is_refused(run: RunDir, tmp_path: Path) -> None:
    other, out = make_model(tmp_path / "other", layers=1), tmp_path / "out"
    out.mkdir()
    with pytest.raises(ValueError, match=r"its files have no model\.layers\.1\..* and 6 more"):
        merge_into(out, str(other), run.broadcast_dir(1))
    wide, out = make_model(tmp_path / "wide", hidden=32), tmp_path / "out2"
    out.mkdir()
    with pytest.raises(ValueError, match="the weight has shape"):
        merge_into(out, str(wide), run.broadcast_dir(1))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"model\.safetensors not found: only models in safetensors"):
        merge_into(out, str(tmp_path / "empty"), run.broadcast_dir(1))
    with pytest.raises(ValueError, match=r"^base model models/none not found \(from /.*leave --merge out$"):
        merge_into(out, "models/none", run.broadcast_dir(1))


def test_the_base_model_of_a_merge_is_found_from_any_folder(
    run: RunDir, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative name means the folder in which the workspace was started first, and so the card has no link to it."""
    monkeypatch.setattr(exports, "run_child", in_this_process(MERGE_MODULE, merge_main))
    output = OutputDir(run.path.parent)
    path = run.broadcast_dir(2) / "adapter_config.json"
    told = {**json.loads(path.read_text()), "base_model_name_or_path": "models/base"}
    path.write_text(json.dumps(told))
    (tmp_path / "first/models").mkdir(parents=True)
    (tmp_path / "first/models/base").symlink_to(base)
    output.component_config("x").parent.mkdir(parents=True)
    save_devices(output, None)
    save_folder(output, tmp_path / "first")
    done = export(run, tmp_path / "merged", merge=True)
    assert (done.kind, done.base_model) == ("merged", "models/base") and (done.out / "model.safetensors").is_file()
    assert "base_model:" not in (done.out / "README.md").read_text()


@pytest.mark.slow
def test_a_merge_that_fails_leaves_nothing_and_tells_why(run: RunDir, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(ActionError, match="was stopped; nothing was written"):
        export(run, place / "merged", merge=True, stop=lambda: True)
    assert list(place.iterdir()) == []
    (run.broadcast_dir(2) / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(ActionError, match=r"nothing was written: .*step_2/adapter_model.safetensors: not a "):
        export(run, place / "merged", merge=True)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("merge", [False, True])
def test_a_version_that_goes_while_it_is_read_is_followed_by_the_next(
    run: RunDir, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merge: bool
) -> None:
    """As of a run that makes versions quickly and keeps one: its newest goes right before it is copied."""
    copy_of, newest = exports._copy, 2

    def prune_then_copy(source: Path, folder: Path, kind: str) -> None:
        nonlocal newest
        if newest < 4:
            newest += 1
            shutil.rmtree(run.broadcast_dir(newest), ignore_errors=True)
            make_adapter(run.broadcast_dir(newest), base, seed=newest)
            mark_stable(run.broadcast_dir(newest))
            shutil.rmtree(run.broadcast_dir(newest - 1))
        copy_of(source, folder, kind)

    monkeypatch.setattr(exports, "_copy", prune_then_copy)
    monkeypatch.setattr(exports, "run_child", in_this_process(MERGE_MODULE, merge_main))
    done = export(run, tmp_path / "out", merge=merge)
    assert done.step == 4 and f"version {done.step}" in (run.path.parent / "logs" / "audit.jsonl").read_text()
    expected = with_adapter(base, run.broadcast_dir(4))
    if merge:
        assert not (done.out / ".adapter").exists()
        check_same(logits(AutoModelForCausalLM.from_pretrained(done.out)), expected)
    else:
        assert torch.equal(with_adapter(base, done.out), expected)
    make_adapter(run.broadcast_dir(3), base, seed=3)
    mark_stable(run.broadcast_dir(3))
    newest = 3  # so version 4 is made once more, and 3 goes
    with pytest.raises(ActionError, match="does not have a version of step 3; its versions: 1, 4"):
        export(run, tmp_path / "again", step=3, merge=merge)
    assert not (tmp_path / "again").exists()


def test_the_merge_needs_the_run_no_more(run: RunDir, base: Path, tmp_path: Path, monkeypatch: Any) -> None:
    expected = with_adapter(base, run.broadcast_dir(2))
    merge_of = exports._merge

    def prune_then_merge(*args: Any) -> None:
        shutil.rmtree(run.broadcast_dir(2))
        merge_of(*args)

    monkeypatch.setattr(exports, "_merge", prune_then_merge)
    monkeypatch.setattr(exports, "run_child", in_this_process(MERGE_MODULE, merge_main))
    done = export(run, tmp_path / "merged", merge=True)
    check_same(logits(AutoModelForCausalLM.from_pretrained(done.out)), expected)


def test_what_cannot_be_exported_is_refused_in_one_line(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    for out, options, message in (
        (tmp_path / "taken", {}, "already exists: choose a new folder with --out"),
        (tmp_path / "none" / "out", {}, "not found: make the folder first"),
        (run.path / "out", {}, "is inside the workspace"),
        (tmp_path / "out", {"step": 9}, "does not have a version of step 9; its versions: 1, 2"),
        (tmp_path / "out", {"push": "no slash"}, "expected ORG/NAME"),
    ):
        with pytest.raises(ActionError, match=message) as caught:
            export(run, out, **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(ActionError, match="run 'run_b' not found"):
        export_run(run.path.parent, "run_b", tmp_path / "out")
    assert export(run, tmp_path / "out", merge=True, dry_run=True).kind == "merged"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken", "workspace"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e15])
def test_weights_that_are_broken_are_refused(run: RunDir, tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    file = run.broadcast_dir(2) / "adapter_model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    next(iter(tensors.values())).view(-1)[-1] = 1e5
    save_file(tensors, file)
    export(run, tmp_path / "sound")
    next(iter(tensors.values())).view(-1)[-1] = value
    save_file(tensors, file)
    with pytest.raises(ActionError, match=r"^nothing was written: .*: the weights are not finite, or far too large"):
        export(run, tmp_path / "broken")
    assert not (tmp_path / "broken").exists()


def test_what_a_killed_export_leaves_is_removed_by_the_next(run: RunDir, tmp_path: Path) -> None:
    """And what another one is filling is not."""
    place, code = tmp_path / "place", "import os, sys, pathlib; from daemons.exports import _staged\n"
    place.mkdir()
    code += "with _staged(pathlib.Path(sys.argv[1])) as folder: (folder / 'half').touch(); "
    killed = subprocess.run(
        [sys.executable, "-c", code + "os.kill(os.getpid(), 9)", place / "out"], cwd=ROOT, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    (left,) = place.iterdir()
    assert left.name.startswith(".out.") and (left / "half").exists()
    command = [sys.executable, "-c", code + "print(folder, flush=True); input()", str(place / "out")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        filled = Path(other.stdout.readline().strip())
        done = export(run, place / "out")
        assert set(place.iterdir()) == {done.out, filled}
        other.communicate("\n")
    assert other.returncode != 0 and (done.out / "README.md").exists() and list(place.iterdir()) == [done.out]


def test_a_model_that_was_trained_whole_is_copied(run: RunDir, base: Path, tmp_path: Path) -> None:
    shutil.rmtree(run.broadcast)
    run.checkpoint_dir(3).mkdir(parents=True)
    shutil.copytree(base, run.trainer_checkpoint(3))
    (run.trainer_checkpoint(3) / "state.safetensors").write_bytes(b"moments")
    mark_stable(run.checkpoint_dir(3))
    done = export(run, tmp_path / "whole")
    assert done.kind == "model" and not (done.out / "state.safetensors").exists()
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(done.out)), logits(AutoModelForCausalLM.from_pretrained(base))
    )
    (run.trainer_checkpoint(3) / "model.safetensors").unlink()
    with pytest.raises(ActionError, match="the weights of run_a@v3 are not on disk"):
        export(run, tmp_path / "none")


def test_the_card_has_config_curve_and_evaluation(run: RunDir, base: Path, tmp_path: Path) -> None:
    text = (export(run, tmp_path / "adapter", step=2).out / "README.md").read_text()
    head, _, body = text.removeprefix("---\n").partition("\n---\n")
    assert "library_name: peft" in head.splitlines() and "base_model" not in head  # it is a folder
    assert "| 1 | 0.25 |\n| 2 | 0.5 |\n" in body and "| 3 |" not in body
    assert "| version | eval/reverse-text/pass@1 |\n| --- | --- |\n| 2 | 0.75 |" in body
    assert "````toml\n" in body and f'name = "{base}"' in body  # longer than the fence in a value


class FakeHub(BaseHTTPRequestHandler):
    """As much of the hub as an upload of small files needs. `files` of a commit, by path."""

    files: dict[str, bytes] = {}  # noqa: RUF012
    asked: list[tuple[str, Any]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        import base64

        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Authorization"] == "Bearer hf_test"
        answer: dict[str, Any] = {}
        if self.path.endswith("/repos/create"):
            self.asked.append(("create", json.loads(body)))
            answer = {"url": "https://huggingface.co/org/name", "id": "org/name"}
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            answer = {"files": [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in files]}
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {"commitUrl": "https://huggingface.co/org/name/commit/1", "commitOid": "1"}
        self._answer(answer)

    def do_GET(self) -> None:
        self._answer({"id": "org/name", "sha": "0" * 40, "siblings": []})

    def _answer(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    from huggingface_hub import constants

    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        yield url
        server.shutdown()


def test_an_export_is_pushed_to_the_hub(run: RunDir, tmp_path: Path, hub: str) -> None:
    done = export(run, tmp_path / "adapter", push="org/name")
    assert done.url and FakeHub.files == {path.name: path.read_bytes() for path in done.out.iterdir()}
    ((_, asked),) = FakeHub.asked
    assert (asked["name"], asked["organization"], asked["visibility"]) == ("name", "org", "private")
    acts = [json.loads(line)["action"] for line in (run.path.parent / "logs" / "audit.jsonl").read_text().splitlines()]
    assert acts == ["export", "push"]


def test_without_a_token_nothing_is_written(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ActionError, match="no token found; set HF_TOKEN"):
        export(run, tmp_path / "adapter", push="org/name")
    assert not os.path.lexists(tmp_path / "adapter")


def test_a_push_that_fails_keeps_what_was_written(
    run: RunDir, tmp_path: Path, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeHub, "do_POST", lambda self: self.send_error(500))
    with pytest.raises(ActionError, match=r"is complete, but pushing it .* failed: .*500.*hf upload org/name"):
        export(run, tmp_path / "adapter", push="org/name")
    assert (tmp_path / "adapter" / "README.md").exists()
