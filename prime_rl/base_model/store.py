"""The model's folder: whether it is up to date, whether it may be written, and writing it all at once. No torch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prime_rl.contract.files import read_text, staged_dir

MANIFEST = "base_model.json"
MANIFEST_VERSION = 1


class StoreError(RuntimeError):
    """The folder cannot be used; the message is one line with the reason and what to do."""


class Interrupted(RuntimeError):
    """A signal asked to stop."""


def is_up_to_date(out: Path, digest: str) -> bool:
    """Whether `out` holds the model of that digest, with all its files."""
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
            (folder / MANIFEST).write_text(json.dumps({**manifest, **facts}, indent=2) + "\n")
    except OSError as error:
        raise StoreError(f"--out {out}: cannot be written: {error.strerror or error}") from error


def _read_manifest(out: Path) -> dict[str, Any] | None:
    text = read_text(out / MANIFEST)
    try:
        manifest = json.loads(text) if text else None
    except ValueError:
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
