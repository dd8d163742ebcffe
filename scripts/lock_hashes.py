"""Write requirements/cpu.lock and gpu.lock, the hashes of the exact versions: `python -m scripts.lock_hashes`.

The versions are those of constraints.txt and constraints-gpu.txt, nothing is resolved: uv reads from the package index
which files each of them has, for every Python and platform. `make install` and its like refuse other files. A mirror
of the package index is set with UV_DEFAULT_INDEX, one of torch's builds for CPUs with TORCH_CPU_INDEX.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from scripts.install import CPU_LOCK, GPU_LOCK, TORCH_CPU_INDEX, hashes
from scripts.lock_gpu import CPU, GPU, PLATFORM, PYTHON, ROOT, pins, uv

HEADER = """\
# Written by scripts/lock_hashes.py from {source}: change the versions there, then `make lock`.
"""
TIMEOUT_S = 30
_TORCH = re.compile(r"^torch==\S+", re.MULTILINE)


def main(argv: Sequence[str]) -> int:
    if argv:
        print("usage: python -m scripts.lock_hashes", file=sys.stderr)
        return 2
    try:
        cpu, gpu = with_hashes(CPU), with_hashes(GPU)
        version = pins(CPU.read_text(encoding="utf-8"))["torch"]
        cpu = with_torch_cpu(cpu, f"{version}+cpu", torch_cpu_hashes(f"{version}+cpu", ROOT / CPU_LOCK))
    except subprocess.CalledProcessError as error:
        print(f"lock_hashes: {' '.join(error.stderr.split())}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"lock_hashes: {TORCH_CPU_INDEX} cannot be read, set TORCH_CPU_INDEX to a mirror: {error}", file=sys.stderr
        )
        return 1
    for name, source, text in ((CPU_LOCK, CPU, cpu), (GPU_LOCK, GPU, gpu)):
        (ROOT / name).write_text(HEADER.format(source=source.name) + text, encoding="utf-8")
        print(f"{name}: {text.count('==')} packages, {text.count('--hash')} hashes")
    return 0


def with_hashes(versions: Path) -> str:
    """The lines of that file with the hashes of every file that the package index has of them."""
    command = [uv(), "pip", "compile", "--quiet", "--no-deps", "--generate-hashes", "--no-header", "--no-annotate"]
    command += ["--python-version", PYTHON, "--python-platform", PLATFORM, str(versions)]
    # Wheels of this machine, such as torch's build for a CPU, are no files of the index.
    environ = {key: value for key, value in os.environ.items() if key != "UV_FIND_LINKS"}
    return subprocess.run(command, check=True, capture_output=True, env=environ, encoding="utf-8").stdout


def torch_cpu_hashes(version: str, lock: Path) -> set[str]:
    """Of each file of torch's build for CPUs: from the index of its makers, or those in `lock` if it cannot be read.

    Raises OSError when it cannot be read and `lock` has another version.
    """
    try:
        with urllib.request.urlopen(f"{TORCH_CPU_INDEX}/torch/", timeout=TIMEOUT_S) as answer:
            return files_of_torch(version, answer.read().decode())
    except OSError as error:
        known = hashes(lock.read_text(encoding="utf-8")).get(("torch", version)) if lock.exists() else None
        if not known:
            raise
        print(f"lock_hashes: kept the hashes of torch {version}, since {TORCH_CPU_INDEX} cannot be read: {error}")
        return known


def files_of_torch(version: str, page: str) -> set[str]:
    """SHA-256 of the wheels of that version on a page of a package index."""
    wheel = re.escape(f"torch-{version}-").replace(r"\+", r"(?:\+|%2B)")
    found = set(re.findall(rf"{wheel}[\w.-]+#sha256=([0-9a-f]{{64}})", page))
    if not found:
        raise OSError(f"no hashes of torch {version} there")
    return found


def with_torch_cpu(text: str, version: str, files: set[str]) -> str:
    """torch for Linux is its build for CPUs, elsewhere the index's."""
    lines = [f"torch=={version} ; sys_platform == 'linux'", *(f"    --hash=sha256:{each}" for each in sorted(files))]
    return _TORCH.sub(lambda match: " \\\n".join(lines) + f"\n{match[0]} ; sys_platform != 'linux'", text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
