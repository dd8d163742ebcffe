"""A run whose every text is hostile, on a real terminal: what reaches it are the program's own sequences alone.

Which those are is seen in a workspace of the same form with harmless text.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

from benchmarks.tui_terminal import Screen, Terminal
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from tests.patience import PATIENCE_S
from tests.text_attacks import ALL, RUN, Attacked, check_clean
from tests.tui_support import has_looked, screen_text, until
from tui.app import PrlApp
from tui.readers.tabs import TABS
from tui.screens.run import RunScreen

# Keys, and a word of ours that stands on the screen when what they open is there.
PLACES = (("1", "run_attacked"), ("3", "MEMORY"), ("4", "HOST"), ("5", "WHAT"))
TAB_WORDS = ("reward", "advant.", "batch_size", "after the last", "step 1|STABLE|complete", "by ")
RUNS = (RUN, "run_noted", "run_failed")

SEQUENCE = re.compile(
    r"\x1b\[(?P<private>[<-?]?)[0-9;:]*(?P<between>[ -/]*)(?P<final>[@-~])"
    r"|\x1b(?P<kind>[\]PX^_])(?P<string>[^\x07\x1b]*)(?:\x07|\x1b\\)"
    r"|\x1b(?P<escape>[^\[])"
    r"|(?P<control>[\x00-\x09\x0b-\x1a\x1c-\x1f\x7f-\x9f\u200b\u202e\u2060\u2066\ufeff\U000e0041])"
    r"|(?P<rest>\x1b)"
)


def kinds(drawn: str) -> set[str]:
    """The kinds of sequences and control characters in what was written to a terminal."""
    found = set()
    for token in SEQUENCE.finditer(drawn):
        if token["final"]:
            found.add(f"CSI {token['private']}{token['between']}{token['final']}")
        elif token["kind"]:
            found.add(f"string {token['kind']}{(token['string'] or '').partition(';')[0]}")
        else:
            found.add(ascii(token[0]))
    return found


class Recorder(Screen):
    """A screen that keeps all that was written to it."""

    def __init__(self, width: int, height: int) -> None:
        super().__init__(width, height)
        self.drawn: list[str] = []

    def feed(self, data: str) -> None:
        self.drawn.append(data)
        super().feed(data)


SIZE = (160, 48)


def on_a_terminal(*words: str) -> tuple[Terminal, Recorder]:
    terminal = Terminal([sys.executable, *words], size=SIZE)
    recorder = Recorder(*SIZE)
    terminal.screen = recorder
    return terminal, recorder


def walk(output: OutputDir) -> str:
    """All that `prl-tui` writes while a person looks at every screen, and at every tab of some runs."""
    terminal, recorder = on_a_terminal("-m", "tui", str(output.path))

    def sees(words: str) -> None:
        terminal.wait(lambda screen: re.search(words, screen.text()), words, timeout_s=PATIENCE_S)

    def command(words: str) -> None:
        terminal.press(":")
        sees("sort reward")
        terminal.press(words)
        sees(f": ?{words}")
        terminal.press("\r")

    with terminal:
        sees("run_attacked")
        for key, words in PLACES:
            terminal.press(key)
            sees(words)
            terminal.press("jj")
        for run_id in RUNS:
            command("runs")
            sees(" STATE .*RUN ")
            command(f"open {run_id}")
            sees(f" prl  {run_id}  ")
            for number, words in enumerate(TAB_WORDS if run_id == RUN else TAB_WORDS[:1], start=1):
                terminal.press(str(number))
                sees(words)
            terminal.press("3")
            sees("batch_size")
            if run_id == RUN:
                terminal.press("v")
                sees("keys are set")
        command("quit")
        wait_for(lambda: not terminal.read(0.1), "prl-tui to end", timeout_s=PATIENCE_S)
    return "".join(recorder.drawn)


# Commands one after another in one interpreter, as their start is not what is looked at; with a line after each.
END = "the end of a command"
COMMANDS = f"""
import json, sys
from daemons.cli import run
for words in json.loads(sys.argv[1]):
    run(words)
    sys.stderr.flush()
    print({END!r}, flush=True)
"""


def printed(commands: Sequence[Sequence[str]]) -> list[str]:
    """All that each of these commands of `prl` writes to a terminal."""
    terminal, recorder = on_a_terminal("-c", COMMANDS, json.dumps(commands))
    with terminal:
        wait_for(lambda: not terminal.read(0.1), f"{commands} to end", timeout_s=PATIENCE_S)
    *drawn, rest = "".join(recorder.drawn).split(f"{END}\r\n")
    assert rest == "" and len(drawn) == len(commands)
    return drawn


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Attacked:
    return Attacked(OutputDir(tmp_path_factory.mktemp("attacked")), ALL).build()


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> Attacked:
    return Attacked(OutputDir(tmp_path_factory.mktemp("harmless")), "{} x").build()


@pytest.mark.slow
async def test_what_the_screens_draw(attacked: Attacked) -> None:
    app = PrlApp(attacked.output.path, clock=time.time)
    app.animation_level = "none"
    seen = ""

    def check(words: str) -> bool:
        nonlocal seen
        drawn = screen_text(app)
        check_clean("the screen", iter((drawn,)))
        seen += drawn
        return re.search(words, drawn) is not None

    async with app.run_test(size=(200, 100)) as pilot:
        await until(pilot, lambda: has_looked(app), "a look")
        for key, words in PLACES:
            await pilot.press(key)
            await until(pilot, lambda words=words: check(words), words)
        await pilot.press("1")
        app.call_next(app.open_run, RUN)
        await until(pilot, lambda: isinstance(app.screen, RunScreen), "the run")
        for number, words in enumerate(TAB_WORDS, start=1):
            await pilot.press(str(number))
            await until(pilot, lambda words=words: check(words), f"{words} of {TABS[number - 1]}")
    shown = {place for word, place in attacked.places.items() if word in seen}
    assert len(shown) > 30, f"little was attacked: {shown}"


@pytest.mark.slow
def test_every_screen_and_tab_in_a_terminal(attacked: Attacked, harmless: Attacked) -> None:
    ours = kinds(walk(harmless.output))
    assert not ours & {"string ]0", "string ]1", "string ]2", "string ]52"}
    foreign = kinds(walk(attacked.output)) - ours
    assert not foreign


def reading() -> Iterator[tuple[str, ...]]:
    for words in (
        ("status",),
        ("runs", "list"),
        ("runs", "show", RUN),
        ("runs", "samples", RUN),
        ("multinode", "status"),
    ):
        yield words
        yield (*words, "--json")
    yield from (("runs", "show", "run_noted"), ("logs", RUN), ("logs", "trainer"), ("doctor", "--quick"))


@pytest.mark.slow
def test_every_reading_command_in_a_terminal(attacked: Attacked) -> None:
    commands = [[*words, "--output-dir", str(attacked.output.path)] for words in reading()]
    for words, drawn in zip(commands, printed(commands), strict=True):
        assert kinds(drawn) <= {"CSI m", ascii("\r")}, words
        assert "--json" not in words or kinds(drawn) <= {ascii("\r")}, words
        assert len(drawn) > 20, words
