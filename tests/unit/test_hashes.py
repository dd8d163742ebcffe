"""requirements/*.lock: the hashes of all versions; and neither uv nor pip installs a file with another hash."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import install, lock_hashes
from scripts.lock_gpu import CPU, GPU, pins

ROOT = Path(__file__).parents[2]
LOCKS = {CPU: ROOT / install.CPU_LOCK, GPU: ROOT / install.GPU_LOCK}
# Of uv, when the index cannot be reached.
NO_NETWORK = ("error sending request", "failed to lookup address", "timed out", "dns error")
WHEEL = "tinything-1.0-py3-none-any.whl"


@pytest.mark.parametrize("versions", LOCKS, ids=lambda path: path.name)
def test_every_version_has_its_hashes(versions: Path) -> None:
    """Names and versions of the lock are those of the constraints; torch for a CPU has its build besides."""
    locked = install.hashes(LOCKS[versions].read_text())
    expected = set(pins(versions.read_text(encoding="utf-8")).items())
    if versions == CPU:
        expected.add(("torch", f"{dict(expected)['torch']}+cpu"))
    assert locked.keys() == expected, f"{sorted(locked.keys() ^ expected)}: make lock"
    assert not [key for key, files in locked.items() if not files]


@pytest.mark.release
@pytest.mark.parametrize("versions", LOCKS, ids=lambda path: path.name)
def test_the_hashes_are_those_of_the_index(versions: Path) -> None:
    """All but those of torch's build for CPUs, which another index has; a version may have got further files."""
    pytest.importorskip("uv", reason="uv is not installed: make install-test")
    try:
        now = install.hashes(lock_hashes.with_hashes(versions))
    except subprocess.CalledProcessError as error:
        if any(sign in error.stderr for sign in NO_NETWORK):
            pytest.skip(f"the package index cannot be reached: {error.stderr.splitlines()[-1]}")
        raise AssertionError(error.stderr) from error
    locked = install.hashes(LOCKS[versions].read_text())
    assert {key for key in now if not locked[key] <= now[key]} == set()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose index has one package, with its virtual environment; `lock` writes the hash of its wheel."""
    uv = pytest.importorskip("uv", reason="uv is not installed: make install-test")
    wheel = make_wheel(tmp_path / "index")
    (tmp_path / "requirements").mkdir()
    (tmp_path / install.CPU_VERSIONS).write_text("tinything==1.0\n")
    lock(tmp_path, hashlib.sha256(wheel.read_bytes()).hexdigest())
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    (tmp_path / "venv" / "bin" / "uv").symlink_to(uv.find_uv_bin())
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.setenv(name, str(tmp_path / "index"))
    for name in ("PIP_NO_INDEX", "UV_NO_INDEX", "UV_NO_CACHE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(install, "ROOT", tmp_path)
    for name, file in (("VENV", "venv"), ("PIP_LOG", "log"), ("PIP_REPORT", "report.json")):
        monkeypatch.setattr(install, name, tmp_path / file)
    return tmp_path


def make_wheel(folder: Path) -> Path:
    folder.mkdir()
    files = {
        "tinything.py": "",
        "tinything-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tinything\nVersion: 1.0\n",
        "tinything-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "tinything-1.0.dist-info/RECORD"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(
            record, "".join(f"{name},{digest(text)},{len(text)}\n" for name, text in files.items()) + f"{record},,\n"
        )
    return folder / WHEEL


def digest(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def lock(place: Path, sha256: str) -> None:
    (place / install.CPU_LOCK).write_text(f"tinything==1.0 \\\n    --hash=sha256:{sha256}\n")


def installed(place: Path) -> bool:
    return any((place / "venv").rglob("tinything.py"))


@pytest.mark.slow
def test_a_file_with_its_hash_is_installed(place: Path) -> None:
    install.uv("tinything")
    assert installed(place) and not install.PIP_REPORT.exists()


@pytest.mark.slow
def test_uv_refuses_another_file_and_pip_is_not_asked(place: Path) -> None:
    lock(place, "0" * 64)
    with pytest.raises(subprocess.CalledProcessError) as error:
        install.uv("tinything")
    assert not installed(place) and not install.PIP_REPORT.exists()
    assert "not the file" in install.explain(error.value)


@pytest.mark.slow
def test_pip_takes_the_right_file_and_removes_another(place: Path) -> None:
    """As where uv cannot install: here, without a uv."""
    (place / "venv" / "bin" / "uv").unlink()
    install.uv("tinything")
    assert installed(place) and install.PIP_REPORT.exists()
    install.run([str(place / "venv" / "bin" / "python"), "-m", "pip", "uninstall", "--yes", "tinything"], {})
    lock(place, "0" * 64)
    with pytest.raises(subprocess.CalledProcessError) as error:
        install.uv("tinything")
    assert not installed(place)
    assert "not the file" in install.explain(error.value) and "tinything 1.0" in install.PIP_LOG.read_text()


def test_hashes_of_torch_for_a_cpu_come_from_its_index() -> None:
    """Those of all files of that version, and of no other."""
    page = (
        f'<a href="/whl/torch-2.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl#sha256={"1" * 64}">torch</a>'
        f'<a href="/whl/torch-2.0+cpu-cp312-cp312-linux_s390x.whl#sha256={"2" * 64}">torch</a>'
        f'<a href="/whl/torch-2.0.1%2Bcpu-cp312-cp312-linux_s390x.whl#sha256={"3" * 64}">torch</a>'
    )
    assert lock_hashes.files_of_torch("2.0+cpu", page) == {"1" * 64, "2" * 64}
    with pytest.raises(OSError, match=r"no hashes of torch 2\.1\+cpu"):
        lock_hashes.files_of_torch("2.1+cpu", page)


def test_hashes_of_torch_are_kept_without_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_hashes, "TORCH_CPU_INDEX", (tmp_path / "nothing").as_uri())
    text = lock_hashes.with_torch_cpu("torch==2.0 \\\n    --hash=sha256:" + "1" * 64, "2.0+cpu", {"2" * 64})
    (tmp_path / "cpu.lock").write_text(text)
    assert install.hashes(text) == {("torch", "2.0"): {"1" * 64}, ("torch", "2.0+cpu"): {"2" * 64}}
    assert lock_hashes.torch_cpu_hashes("2.0+cpu", tmp_path / "cpu.lock") == {"2" * 64}
    with pytest.raises(OSError, match="nothing"):
        lock_hashes.torch_cpu_hashes("2.1+cpu", tmp_path / "cpu.lock")
