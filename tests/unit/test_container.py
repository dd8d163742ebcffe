"""The files of the container: linted, and consistent with the project; integration/test_container.py runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "container"
DOCKERFILE = FOLDER / "Dockerfile"
LINTER = Path(sys.executable).parent / "hadolint"


@pytest.mark.skipif(not LINTER.exists(), reason="hadolint has no build for this platform")
def test_the_dockerfile_is_without_findings() -> None:
    done = subprocess.run([LINTER, "--no-color", DOCKERFILE], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_each_service_has_its_stage_and_files_that_exist() -> None:
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE.read_text(), re.MULTILINE))
    assert set(compose["services"]) == {"cpu", "gpu"} < stages
    for name, service in compose["services"].items():
        build = service["build"]
        assert build["target"] == name
        assert (FOLDER / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).samefile(DOCKERFILE)
        (configs,) = [each.split(":") for each in service["volumes"] if each.startswith("..")]
        assert (FOLDER / configs[0]).resolve() == ROOT / "configs"
        for word in service.get("command", ()):
            if word.startswith("/configs/"):
                assert (ROOT / word.lstrip("/")).is_file(), word


def test_versions_come_from_the_locks() -> None:
    """No version stands in the file, and each package but those that build is installed with its lock's hashes."""
    text = DOCKERFILE.read_text()
    assert "==" not in text
    locks = re.findall(r"uv pip install .*?-c /dist/(\S+)", text)
    assert locks == ["cpu.lock", "cpu.lock", "gpu.lock"] and len(re.findall("uv pip install", text)) == 3
    assert all((ROOT / "requirements" / name).is_file() for name in locks)


def test_what_the_image_copies_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()} - {"."}
    assert names and not names & set(ignored) and all((ROOT / name).exists() for name in names)
