"""The tab Chat of a run in a real app, with a real inference server behind it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from daemons.chat import Chat, ChatSettings
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.text import one_line
from tests.chat_support import GREEDY, answer_of, chat_server, loaded
from tests.inference_support import KEY, RunningServer
from tests.patience import PATIENCE_S
from tests.tui_run_support import Opened, opened_run
from tests.tui_support import add_run, screen_text
from tui.messages import ChatChanged, ChatTurn
from tui.screens.acting_places import ActingRunScreen
from tui.screens.compare import PickRuns
from tui.screens.runs import RunsScreen
from tui.widgets.chat_view import ChatTalk, ChatView

# With the others that start servers of this engine: a worker loads it once.
pytestmark = pytest.mark.xdist_group("server")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    yield from chat_server(tmp_path_factory.mktemp("chat"))


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRL_API_KEY", KEY)


@asynccontextmanager
async def opened_chat(
    output_dir: Path, run_id: str = "run_a", settings: ChatSettings = GREEDY
) -> AsyncIterator[tuple[Opened, ChatView]]:
    """The tab Chat of a run."""
    async with opened_run(output_dir, run_id) as o:
        screen = o.screen
        assert isinstance(screen, ActingRunScreen)
        view = screen.chat
        view.talk = ChatTalk(output_dir, run_id, view.post_message, settings)
        await o.press("7")
        await o.until(lambda: screen.tab == "chat" and view.line.has_focus, "the tab Chat")
        yield o, view


async def put(o: Opened, view: ChatView, question: str, num_turns: int) -> str:
    """The answer to `question`, when it is complete."""
    await o.press(*question, "enter")
    await o.until(lambda: len(view.look.turns) == num_turns and view.look.state == "idle", f"{num_turns} turns")
    assert view.look.problem is None
    return view.look.turns[-1].text


async def test_the_tab_loads_a_version_with_the_first_question_and_unloads_it_when_it_is_left(
    server: RunningServer,
) -> None:
    async with opened_chat(server.output_dir) as (o, view):
        assert loaded(server) == []
        first = await put(o, view, "q7? ", 2)  # keys of the screen are letters of the line
        assert loaded(server) == ["chat/run_a@v2"] and view.look.turns[-1].name == "run_a@v2"
        assert first == answer_of(server, "chat/run_a@v2", "q7? ")
        await o.sees("run_a@v2 is loaded", "── you ──", "q7?", "── run_a@v2 ──")
        second = await put(o, view, "and", 4)
        assert second == answer_of(server, "chat/run_a@v2", "q7? ", first, "and")
        await o.press("shift+tab")
        await o.until(lambda: view.look.label is None, "the tab to be left")
        assert o.screen.tab == "events" and loaded(server) == []
        await o.press("7")
        await put(o, view, "go on", 6)
        assert loaded(server) == ["chat/run_a@v2"]
        await o.press("ctrl+r")
        await o.until(lambda: view.look.turns == (), "a new conversation")
        assert await put(o, view, "q7? ", 2) == first
        await o.press("escape", "escape")
        await o.until(lambda: isinstance(o.app.screen, RunsScreen), "home")
        await o.until(lambda: loaded(server) == [], "the version to be unloaded")


@pytest.mark.slow
async def test_another_version_is_chosen_and_gets_the_last_question(server: RunningServer) -> None:
    async with opened_chat(server.output_dir) as (o, view):
        await put(o, view, "hello", 2)
        await o.press("ctrl+t")
        await o.until(lambda: isinstance(o.app.screen, PickRuns), "the versions")
        await o.sees("run_a@v2", "run_a@v1", "base")
        await o.press(*"@v1", "enter")
        await o.until(lambda: view.line.value == "hello", "the last question")
        assert view.look.turns == () and loaded(server) == []
        answer = await put(o, view, "", 2)
        assert loaded(server) == ["chat/run_a@v1"] and answer == answer_of(server, "chat/run_a@v1", "hello")
    wait_for(lambda: loaded(server) == [], "the console's end to unload it", timeout_s=PATIENCE_S)


@pytest.fixture
def slow_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes after the first piece of an answer until someone stops a chat."""
    stopped, answer, stop = threading.Event(), Chat.answer, Chat.stop

    def first_then_wait(chat: Chat, text: str) -> Iterator[str]:
        for part in answer(chat, text):
            yield part
            stopped.wait(PATIENCE_S)

    def stop_and_tell(chat: Chat) -> None:
        stop(chat)
        stopped.set()

    monkeypatch.setattr(Chat, "answer", first_then_wait)
    monkeypatch.setattr(Chat, "stop", stop_and_tell)


async def test_escape_stops_the_answer_and_not_the_conversation(server: RunningServer, slow_answers: None) -> None:
    async with opened_chat(server.output_dir, settings=ChatSettings(max_tokens=240)) as (o, view):
        await o.press(*"hello", "enter")
        await o.until(lambda: len(view.look.turns) == 2, "the beginning of an answer")
        await o.press("escape")
        await o.until(lambda: view.look.state == "idle", "its end")
        assert o.screen.tab == "chat" and view.look.problem is None
        wait_for(
            lambda: b"prl_requests_running 0.0" in server.get("/metrics").content, "it to stop", timeout_s=PATIENCE_S
        )
        await put(o, view, "again", 4)
        stops: list[str] = []
        view.talk.stop = lambda: stops.append(view.look.state)  # type: ignore[method-assign]
        view.show(replace(view.look, state="answering"))
        await o.press("escape")
        assert stops == ["answering"] and view.line.has_focus
        view.show(replace(view.look, state="idle"))
        await o.press("escape")
        assert not view.line.has_focus and o.app.screen is o.screen


@pytest.mark.slow
async def test_what_cannot_be_is_one_line_and_the_question_is_given_back(tmp_path: Path) -> None:
    add_run(OutputDir(tmp_path), "run_a", step=3)
    async with opened_chat(tmp_path) as (o, view):
        await o.press(*"hello", "enter")
        await o.until(lambda: view.look.problem is not None, "the reason")
        await o.sees(f"inference of {tmp_path} is not")
        await o.until(lambda: view.line.value == "hello", "the question, which comes after the reason")
        assert str(view.look.problem).endswith("is not running: start the workspace with prl up")
        assert view.look.turns == () and "── you ──" not in screen_text(o.app)
        await o.press("escape", "1")
        assert o.screen.tab == "charts"
    async with opened_run(tmp_path, "run_a", read_only=True) as o:
        assert "Chat" not in screen_text(o.app) and "chat" not in o.screen.views


@pytest.mark.slow
async def test_a_question_during_an_answer_stays_in_the_line_with_the_reason(tmp_path: Path) -> None:
    add_run(OutputDir(tmp_path), "run_a", step=3)
    async with opened_chat(tmp_path) as (o, view):
        words = "an answer is under way: esc stops it"
        view.show(replace(view.look, state="answering"))
        await o.press(*"and", "enter")
        assert words in screen_text(o.app) and view.line.value == "and"
        view.show(replace(view.look, turns=(ChatTurn(None, one_line("hello")),)))
        await o.sees("hello", words)
        view.show(replace(view.look, state="idle"))
        await o.pilot.pause()
        assert words not in screen_text(o.app)


def test_a_question_that_was_stopped_before_its_turn_is_not_asked(server: RunningServer) -> None:
    seen: list[ChatChanged] = []
    talk = ChatTalk(server.output_dir, "run_a", seen.append, GREEDY)
    talk.ask("hello")
    talk.stop()
    talk.ask("and")
    talk.end()
    talk.run()
    assert seen == [] and loaded(server) == []
