"""The site of the documents: it builds without a warning and loads nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What a browser fetches when a page is opened, by tag; a link that a reader may follow is none of it.
LOADED = {"img": "src", "script": "src", "link": "href", "source": "src", "iframe": "src", "object": "data"}


class Loads(HTMLParser):
    """The addresses that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if value and name == LOADED.get(tag)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` builds it. Strict: a link or an anchor that leads nowhere is an error."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: make install-test")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_on_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 25 and all((site / page).with_suffix(".html").is_file() for page in pages)
    assert (site / "CONTRIBUTING.html").is_file() and (site / "configs" / "recipes" / "index.html").is_file()


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        page = Loads()
        page.feed(path.read_text())
        assert page.found and [each for each in page.found if re.match(r"\w+:|//", each)] == [], path.name
    for path in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", path.read_text()), path.name


def test_a_question_is_two_clicks_from_the_readme() -> None:
    """README, questions, answer. Where the links lead is checked when the site is built."""
    assert "(docs/questions.md)" in (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \| .+ \| (.+) \|$", (ROOT / "docs" / "questions.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 21))
    assert all(re.search(r"\]\([\w./#-]+\)", links) for _, links in rows)
    answers = {
        "without a trainer": "data.md#try-it",
        "evaluate a finished run, and the base": "evaluate.md#evaluate",
        "finished run longer": "evaluate.md#train-a-finished-run-longer",
        "best run with its seeds": "export.md#the-best-run",
        "edited file": "sharing.md#my-file-was-edited-what-now",
        "serve a checkpoint": "evaluate.md#serve-a-finished-run",
        "in a notebook": "results.md",
        "reward in one file": "data.md#a-reward-in-a-file",
        "longer sequences": "training.md#longer-sequences",
        "different base model": "config.md#a-workspace-the-system-file",
        "dropped rollout": "environments.md#when-an-environment-fails",
        "why nothing learns": "learning.md",
    }
    asked = (ROOT / "docs" / "questions.md").read_text().splitlines()
    for words, place in answers.items():
        (row,) = (line for line in asked if words in line)
        assert f"({place})" in row, words
        page, _, section = place.partition("#")
        heads = re.findall("^#+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
        assert not section or section in {re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in heads}
    for page in ("README.md", "docs/index.md"):
        assert re.search(r"\((docs/)?questions\.md\)", (ROOT / page).read_text()), page
