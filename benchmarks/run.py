"""`python -m benchmarks.run [NAME...]`: run the named benchmarks (all, when none is named) and print their figures."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from benchmarks.frame import write_result


def names() -> list[str]:
    """All benchmarks there are."""
    return sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))


def main(argv: list[str]) -> int:
    unknown = sorted(set(argv) - set(names()))
    if unknown:
        print(f"bench: no benchmark {unknown[0]!r}; there are: {', '.join(names())}", file=sys.stderr)
        return 2
    for name in argv or names():
        figures = importlib.import_module(f"benchmarks.bench_{name}").run()
        path = write_result(name, figures)
        width = max(map(len, figures))
        print(f"{name}  ({path})")
        for figure, value in figures.items():
            print(f"  {figure:<{width}}  {value:.3g}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
