"""Print how large the packages are, and the walks through them: `python -m scripts.size`. Fails nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("prime_rl", "daemons", "tui")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Size:
    """Counted of some Python files.

    Attributes:
        lines: all of them, blank ones and comments too.
        in_bodies: lines of functions and methods below their signature and docstring; of nested ones once.
        longest_file: lines of the longest file.
        longest_function: lines of the longest function, with its signature and docstring.
    """

    files: int
    lines: int
    in_bodies: int
    longest_file: int
    longest_function: int

    @property
    def body_share(self) -> float:
        """The part of all lines that is in function bodies, in percent."""
        return 100 * self.in_bodies / max(1, self.lines)


def size_of(texts: Iterable[str]) -> Size:
    """Return the size of the files that have these texts."""
    files, lines, bodies, functions = 0, [0], 0, [0]
    for text in texts:
        files += 1
        lines.append(len(text.splitlines()))
        body_lines: set[int] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, FUNCTIONS) and node.end_lineno is not None:
                functions.append(node.end_lineno - node.lineno + 1)
                statements = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
                if statements:
                    body_lines.update(range(statements[0].lineno, node.end_lineno + 1))
        bodies += len(body_lines)
    return Size(files, sum(lines), bodies, max(lines), max(functions))


def walks(page: str) -> dict[str, list[str]]:
    """Return the files of each walk on a page of docs/explanation, by its heading: those in its table, once each."""
    found = {}
    for section in re.split(r"^#+ ", page, flags=re.MULTILINE):
        rows = "\n".join(re.findall(r"^\|.*", section, re.MULTILINE))
        if files := re.findall(r"`((?:prime_rl|daemons|tui)/[\w/]+\.py)`", rows):
            found[section.splitlines()[0]] = list(dict.fromkeys(files))
    return found


def main() -> None:
    """Print one line for each package, one for all of them, and one for each walk."""
    texts = {
        name: [path.read_text(encoding="utf-8") for path in sorted((ROOT / name).rglob("*.py"))] for name in PACKAGES
    }
    rows = {**texts, "all": [text for each in texts.values() for text in each]}
    print(f"{'':10}{'files':>7}{'lines':>9}{'in bodies':>11}{'longest file':>14}{'function':>10}")
    for name, each in rows.items():
        size = size_of(each)
        share = f"{size.body_share:.0f} %"
        print(f"{name:10}{size.files:7}{size.lines:9,}{share:>11}{size.longest_file:14}{size.longest_function:10}")
    for path in sorted((ROOT / "docs" / "explanation").glob("*.md")):
        for heading, files in walks(path.read_text(encoding="utf-8")).items():
            print(f"walk {path.stem}: {heading}: {len(files)} files")


if __name__ == "__main__":
    main()
