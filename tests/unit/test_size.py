"""The figures of `python -m scripts.size`."""

from __future__ import annotations

import pytest

from scripts.size import main, size_of, walks

TEXT = '''"""A module."""

CONSTANT = 1


def documented(value: int) -> int:
    """Return one more."""
    more = value + 1

    return more


class Thing:
    def only_documented(self) -> None:
        """Do nothing."""

    def outer(self) -> int:
        def inner() -> int:
            return 2

        return inner()
'''


def test_lines_files_and_the_share_of_function_bodies() -> None:
    size = size_of([TEXT, "import os\n"])
    assert (size.files, size.lines, size.longest_file) == (2, 22, 21)
    # Three of `documented`, four of `outer`, in which `inner` is counted once.
    assert (size.in_bodies, size.longest_function) == (7, 5)
    assert size.body_share == pytest.approx(100 * 7 / 22)
    assert size_of([]).body_share == 0


def test_a_walk_is_the_files_of_a_table() -> None:
    page = "# A\n`tui/app.py`\n## B\n| `tui/app.py`, `tui/keys.py` | both |\n| `tui/app.py` | again |\n## C\n| word |\n"
    assert walks(page) == {"B": ["tui/app.py", "tui/keys.py"]}


@pytest.mark.slow
def test_the_packages_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:5]] == ["prime_rl", "daemons", "tui", "all"]
    assert {row.split(":")[0] for row in rows[5:]} >= {
        f"walk {name}" for name in ("batch", "pause", "rollout", "screen", "up")
    }
