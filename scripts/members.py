"""The tables of docs/runs.md: what `prime_rl.trainer.runs` offers, from its signatures and docstrings.

A member of a class is an attribute that the docstring lists, a property or a method; names with an underscore are not
shown. What has no text of its own has an empty cell, which tests/test_reference.py refuses.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from prime_rl.trainer import runs

BEGIN, END = "<!-- members -->\n", "<!-- end of members -->"


def with_members(page: str) -> str:
    """`page` with the tables of now between its two marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{members()}\n{END}{rest.partition(END)[2]}"


def members() -> str:
    """The functions in one table, and each class with its own."""
    offered = {name: getattr(runs, name) for name in runs.__all__}
    functions = [(_title(name, it), about(name, it)) for name, it in offered.items() if not _is_own_class(name, it)]
    sections = [_table("function", functions)]
    for name, it in offered.items():
        if _is_own_class(name, it):
            rows = [(title, text) for _, title, text in rows_of(it)]
            sections.append(f"### {name}\n\n{_first_sentence(it)}\n\n{_table('member', rows)}")
    return "\n".join(sections)


def rows_of(kind: type) -> Iterator[tuple[str, str, str]]:
    """Name, signature and text of each public member, in the order of the source; the parent's own come last."""
    for parent in kind.__mro__:
        for name, text in _attributes(parent, kind):
            annotation = parent.__annotations__.get(name)
            yield name, f"{name}: {_plain(annotation)}" if annotation else name, text
    for parent in kind.__mro__[:-1]:
        for name, member in vars(parent).items():
            it = member.fget if isinstance(member, property) else member
            if not name.startswith("_") and inspect.isfunction(it):
                title = f"{name}: {_plain(it.__annotations__['return'])}" if isinstance(member, property) else None
                yield name, title or _title(name, it), about(name, it)


def about(name: str, it: Any) -> str:
    """What a member is: the first sentence of its docstring, or the name that it is another one of."""
    return _first_sentence(it) if it.__name__ == name else f"`{it.__name__}` under its older name."


def _is_own_class(name: str, it: Any) -> bool:
    return inspect.isclass(it) and it.__name__ == name


def _attributes(parent: type, kind: type) -> Iterator[tuple[str, str]]:
    """Those that `parent` lists under `Attributes`, and under `Args` where `kind` keeps them under their names."""
    source = "".join(inspect.getsource(each) for each in kind.__mro__[:-1])
    found = re.findall(r"^(Args|Attributes):\n((?: {4}.*\n?)+)", inspect.getdoc(parent) or "", re.MULTILINE)
    for title, text in found:
        for line in re.sub(r"\n {5,}", " ", text).strip().splitlines():
            names, _, rest = line.strip().partition(": ")
            for name in names.split(", "):
                if title == "Attributes" or f"self.{name} = {name}" in source or f"self.{name} = Path(" in source:
                    yield name, rest[0].upper() + rest[1:]


def _first_sentence(it: Any) -> str:
    return re.split(r"(?<=[.:]) (?=[A-Z])", " ".join((inspect.getdoc(it) or "").partition("\n\n")[0].split()))[0]


def _title(name: str, it: Any) -> str:
    parameters = list(inspect.signature(it).parameters.values())
    shown = inspect.signature(it)
    if parameters and parameters[0].name == "self":
        shown = shown.replace(parameters=parameters[1:])
    return f"{name}{_plain(str(shown))}"


def _plain(annotation: str) -> str:
    """Without the quotes of an annotation; a bar would end the cell of a table."""
    return annotation.replace("'", "").replace(" | ", " or ").removesuffix(" -> None")


def _table(head: str, rows: list[tuple[str, str]]) -> str:
    return "\n".join([f"| {head} | what |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in rows), ""])
