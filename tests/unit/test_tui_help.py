"""The keys have one home, the bindings: help screen and docs/tui.md have all of them and no other."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

from textual.dom import DOMNode

import tui
from tui.keys import bindings_of, key_names, key_rows, markdown, owners
from tui.screens.base import describe_help

DOCS = Path(__file__).parents[2] / "docs" / "tui.md"


def classes_with_keys() -> set[type[DOMNode]]:
    found = set()
    for info in pkgutil.walk_packages(tui.__path__, "tui."):
        if not info.name.endswith("__main__"):
            for kind in vars(importlib.import_module(info.name)).values():
                if isinstance(kind, type) and kind.__module__.startswith("tui.") and any(bindings_of(kind)):
                    found.add(kind)
    return found


def help_text(*, read_only: bool) -> str:
    return describe_help(read_only).plain


def test_every_class_with_keys_is_in_the_help() -> None:
    assert classes_with_keys() == {
        owner for classes in owners().values() for owner in classes if any(bindings_of(owner))
    }


def test_every_binding_stands_in_the_help_with_what_it_does() -> None:
    text = help_text(read_only=False)
    lines = text.splitlines()
    for classes in owners().values():
        for owner in classes:
            for binding in bindings_of(owner):
                words = binding.tooltip or binding.description
                assert words, f"{owner.__name__}: {binding.key} has no words"
                (first, *_) = [line for line in lines if line.lower().endswith(f" {words.lower()}")] or [""]
                assert first, f"{owner.__name__}: {binding.key} ({words}) is not in the help"
                of_all = {key for line in lines if line.lower().endswith(f" {words.lower()}") for key in line.split()}
                assert of_all >= set(key_names(binding)), f"{owner.__name__}: {binding.key} ({words})"
    assert re.search(r"^  P +the daemons", text, re.MULTILINE)


def test_a_read_only_user_sees_no_key_that_acts() -> None:
    text = help_text(read_only=True)
    assert "Runs\n" in text and "evict" not in text.replace("evicted", "") and "Act\n" not in text
    code = (
        "import sys; from tui.keys import key_rows; key_rows(read_only=True);"
        "print([name for name in sys.modules if name.startswith('tui.dialogs') or name == 'tui.screens.acting'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_documents_have_the_tables_that_the_bindings_make() -> None:
    text = DOCS.read_text()
    written = text.partition("<!-- keys -->\n")[2].partition("\n<!-- end of keys -->")[0]
    assert written == markdown(), "write what `python -m tui.keys` prints between the two marks of docs/tui.md"
    rest = text.replace(written, "")
    assert not re.search(r"^\| key ", rest, re.MULTILINE), "no other table of keys"


def test_the_keys_that_the_text_of_the_documents_names_are_bound() -> None:
    bound = {key for rows in key_rows().values() for keys, _ in rows for key in keys}
    text = DOCS.read_text().partition("<!-- keys -->")[0]
    named = set(re.findall(r"`([^`\s]|pg\w\w|ctrl\+\w|shift\+\w+)`", text)) - {"■", "▶", "◆"}
    assert named - bound - {"ctrl+p", "shift+tab"} == set()
