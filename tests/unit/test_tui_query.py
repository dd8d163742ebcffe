"""The filter language and the orders of the home screen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemons.workspace_reader import WorkspaceReader
from tests.tui_support import NOW, build_workspace
from tui.model.levels import STATES
from tui.model.query import FIELDS, FLAGS, NUMBERS, SORTS, Subject, complete, parse, sort_rows
from tui.model.snapshot import RunRow, make_snapshot
from tui.readers.workspace_metrics import WorkspaceMetrics

WORDS = ["state:active", "state:wai,fin", "!state:invalid", "reward>0.5", "reward>=50%", "lag<2", "tokens>1k", "name~q",
         "note!=x", "is:problem", "!is:pinned", "seen<5m", "step!=42", '"waits for"', "run_"]  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRow, ...]:
    workspace = build_workspace(tmp_path_factory.mktemp("query") / "workspace")
    found = WorkspaceReader(workspace.path).read(now=NOW)
    return make_snapshot(found, WorkspaceMetrics(workspace.path).update(found), NOW).rows


def ids(rows: tuple[RunRow, ...], text: str, *, pins: frozenset[str] = frozenset()) -> set[str]:
    query = parse(text)
    assert query.errors == ()
    return {row.run_id.removeprefix("run_") for row in rows if query.matches(Subject(row, NOW, row.run_id in pins))}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("QUEUE", {"queued-a", "queued-b"}),
        ("waiting queued-b", {"queued-b"}),
        ("state:active", {"reverse-lr1e-3", "sort-rank16"}),
        ("state:act,evi", {"reverse-lr1e-3", "sort-rank16", "collapsed"}),
        ("state!=active,waiting reward>0.4", {"crashed", "done"}),
        ("reward>80%", {"reverse-lr1e-3", "done"}),
        ("reward<0.2", {"collapsed"}),
        ("step=42", {"reverse-lr1e-3"}),
        ("step:9", {"upper"}),
        ("progress>=100%", {"done"}),
        ("tokens>1.5k", {"reverse-lr1e-3"}),
        ("seen>1h", {"done"}),
        ("seen>40m seen<1h", {"collapsed"}),
        ("name~queued !name~-b", {"queued-a"}),
        ("name:run_done", {"done"}),
        ('note~"free slot"', {"queued-a", "queued-b"}),
        ('"rank 64 is more"', {"crashed"}),
        ("is:problem", {"upper", "crashed", "typo", "collapsed"}),
        ("is:pinned", {"done"}),
        ("is!=pinned name~done", set()),
        ("slot>=0", {"reverse-lr1e-3", "sort-rank16", "upper"}),
        ("step>=42 step<=42", {"reverse-lr1e-3"}),
        ("step>42 name~reverse", set()),
        ("step<42 name~reverse", set()),
    ],
)
def test_what_matches(rows: tuple[RunRow, ...], text: str, expected: set[str] | None) -> None:
    everything = {row.run_id.removeprefix("run_") for row in rows}
    assert ids(rows, text, pins=frozenset({"run_done"})) == (everything if expected is None else expected)


@pytest.mark.parametrize(
    ("text", "age_s"),
    [("seen=45", 45), ("seen=90s", 90), ("seen=3m", 180), ("seen=1.5h", 5400), ("age>=0 seen=2d", 172_800)],
)
def test_ages_in_every_unit(rows: tuple[RunRow, ...], text: str, age_s: float) -> None:
    query = parse(text)
    aged = replace(rows[0], updated_at=NOW - age_s)
    assert query.matches(Subject(aged, NOW)) and not query.matches(Subject(aged, NOW + 1)) and query.errors == ()


@pytest.mark.parametrize(
    ("text", "tokens_per_s"), [("tokens=7", 7), ("tokens=2k", 2e3), ("tokens=.5m", 5e5), ("tokens=1G", 1e9)]
)
def test_figures_in_every_unit(rows: tuple[RunRow, ...], text: str, tokens_per_s: float) -> None:
    assert parse(text).matches(Subject(replace(rows[0], tokens_per_s=tokens_per_s)))
    assert not parse(text).matches(Subject(replace(rows[0], tokens_per_s=tokens_per_s * 1.01)))


def test_reason_and_model_are_texts_also_where_there_is_none(rows: tuple[RunRow, ...]) -> None:
    nothing = replace(rows[0], reason=None, view=replace(rows[0].view, model=None))
    said = replace(rows[0], reason="out of memory", view=replace(rows[0].view, model="models/base"))
    for text in ("reason~memory", "model~base"):
        assert parse(text).matches(Subject(said)) and not parse(text).matches(Subject(nothing))


@pytest.mark.parametrize(
    ("text", "wrong", "message"),
    [
        ("reward>", "reward>", "missing value"),
        ("queued reward>fast", "reward>fast", "invalid number 'fast'"),
        ("reward>5h", "reward>5h", "invalid number '5h'"),
        ("seen<5q queued", "seen<5q", "one of s, m, h, d"),
        ("reward~5", "reward~5", "reward is a number"),
        ("name>5", "name>5", "name is a text"),
        ("state:sleepy", "state:sleepy", "unknown state 'sleepy'"),
        ("is:red", "is:red", "unknown flag 'red' after is"),
        ("a !colour=red b", "!colour=red", "unknown field 'colour'"),
        ('name~"open', 'name~"open', "unclosed quote"),
    ],
)
def test_errors_stand_at_their_term_and_the_other_terms_still_count(
    rows: tuple[RunRow, ...], text: str, wrong: str, message: str
) -> None:
    query = parse(text)
    (error,) = query.errors
    assert text[error.start : error.end] == wrong
    assert message in error.message
    others = [word for word in text.replace(wrong, "").split() if word]
    assert len(query.tests) == len(others)


@given(text=st.text(st.characters(codec="utf-8"), max_size=40) | st.lists(st.sampled_from(WORDS)).map(" ".join))
def test_any_text_is_a_filter_or_says_where_it_is_wrong(text: str) -> None:
    query = parse(text)
    ends = 0
    for error in query.errors:
        assert ends <= error.start < error.end <= len(text) and error.message
        ends = error.end
    completed = complete(text, ["run_a"])
    assert completed is None or (len(completed) > len(text) and completed.startswith(text[: text.rfind(" ") + 1]))


@given(terms=st.lists(st.sampled_from(WORDS), max_size=6), extra=st.sampled_from(WORDS))
def test_a_term_more_never_shows_more_and_their_order_does_not_count(
    rows: tuple[RunRow, ...], terms: list[str], extra: str
) -> None:
    some = ids(rows, " ".join(terms))
    assert ids(rows, " ".join([*terms, extra])) <= some
    assert ids(rows, "  ".join(reversed(terms))) == some
    assert ids(rows, extra) | ids(rows, f"!{extra.removeprefix('!')}") >= some & ids(rows, extra)


def test_completion() -> None:
    assert complete("rew") == "reward"
    assert complete("sta") == "state:"
    assert complete("state:ac") == "state:active"
    assert complete("state:active,wa") == "state:active,waiting"
    assert complete("lag>1 !is:pi") == "lag>1 !is:pinned"
    assert complete("name:run_x", ["run_xyz"]) == "name:run_xyz"
    assert complete("") is None and complete("lag>1 ") is None and complete("nothing") is None
    for field in FIELDS:
        assert parse(f"{field}{'>1' if field in NUMBERS else ':' + next(iter(FLAGS if field == 'is' else STATES))}")


def test_every_order_both_ways(rows: tuple[RunRow, ...]) -> None:
    def order(column: str, descending: bool = False, pins: tuple[str, ...] = ()) -> list[str]:
        return [row.run_id.removeprefix("run_") for row in sort_rows(rows, column, descending, pins)]

    assert order("slot") == [row.run_id.removeprefix("run_") for row in rows]
    assert order("run") == sorted(order("slot"))
    assert order("reward", True)[:3] == ["done", "reverse-lr1e-3", "sort-rank16"]
    assert order("reward")[:1] == ["collapsed"]
    assert set(order("problems", True)[:3]) == {"upper", "crashed", "typo"}
    assert order("seen", True)[0] == "reverse-lr1e-3"
    for column, sort in SORTS.items():
        for descending in (False, True):
            found = order(column, descending)
            assert sorted(found) == sorted(order("slot"))
            values = [sort.key(row) for row in sort_rows(rows, column, descending)]
            known = [value for value in values if value is not None]
            assert values[: len(known)] == known, "what has no value stands last, whichever way"
            assert known == sorted(known, reverse=descending)  # type: ignore[type-var]


def test_waiting_runs_stand_in_the_order_of_admission_and_pins_on_top(rows: tuple[RunRow, ...]) -> None:
    states = [row.run_id for row in sort_rows(rows, "state", False)]
    assert states.index("run_queued-a") < states.index("run_queued-b")
    pinned = sort_rows(rows, "reward", True, {"run_collapsed", "run_done"})
    assert [row.run_id for row in pinned[:2]] == ["run_done", "run_collapsed"]
