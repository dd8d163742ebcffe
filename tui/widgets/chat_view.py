"""A conversation with a version of the run: the turns, a line to type the next question in, and who asks it.

`ChatTalk` is `daemons.chat`, as in `prl chat`, in a thread of its own. The version is loaded with the first question,
and unloaded when the tab is left. Not imported when read-only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Input

from prime_rl.utils.text import clean_text, one_line
from tui.messages import ChatChanged, ChatLook, ChatTurn
from tui.widgets.line_list import Clipped

if TYPE_CHECKING:
    from daemons.chat import Chat, ChatSettings


class ChatTalk:
    """`run` is for a thread; all else is called from the thread that draws, and waits for nothing.

    Args:
        target: a run (its newest version), `run_a@v3`, or "base".
        post: takes messages from any thread.
        settings: how answers are sampled, where they differ from those of `prl chat`.
    """

    def __init__(
        self,
        output_dir: Path,
        target: str,
        post: Callable[[ChatChanged], object],
        settings: ChatSettings | None = None,
    ) -> None:
        self._output_dir = output_dir
        self._target = target
        self._post = post
        self._settings = settings
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._chat: Chat | None = None
        self._is_open = False
        self._look = ChatLook(one_line(target))
        self._num_asked = 0
        self._num_stopped = 0  # questions up to this one are not to be answered any more

    def run(self) -> None:
        """Do what is asked for until `end`."""
        try:
            while (task := self._tasks.get()) is not None:
                task()
        finally:
            self._unload()

    def ask(self, question: str) -> None:
        """Put a question in the queue; `run` answers it after the tasks before it, unless `stop` comes first."""
        self._num_asked += 1
        self._tasks.put(partial(self._answer, self._num_asked, question))

    def stop(self) -> None:
        """End the answer that is under way."""
        self._num_stopped = self._num_asked
        if (chat := self._chat) is not None:
            chat.stop()

    def choose(self, target: str) -> None:
        """Talk to another version. It does not see what was said before; the last question can be put to it again."""
        self.stop()
        self._tasks.put(partial(self._choose, target))

    def reset(self) -> None:
        """Forget the conversation."""
        self.stop()
        self._tasks.put(self._reset)

    def leave(self) -> None:
        """Unload the version. The conversation is kept: the next question loads it again."""
        self.stop()
        self._tasks.put(self._leave)

    def end(self) -> None:
        """End the answer that is under way, and let `run` return; it unloads the version."""
        self.stop()
        self._tasks.put(None)

    def _answer(self, number: int, question: str) -> None:
        from daemons.actions import ActionError

        if number <= self._num_stopped:
            return
        before = self._look.turns
        asked = (*before, ChatTurn(None, clean_text(question)))
        self._show(state="loading", turns=asked, problem=None, question="")
        text = ""
        try:
            chat = self._opened()
            self._show(state="answering", label=chat.label)
            for part in chat.answer(question):
                text += part
                self._show(turns=(*asked, ChatTurn(chat.label, clean_text(text))))
                if number <= self._num_stopped:
                    chat.stop()
        except ActionError as error:
            problem = None if number <= self._num_stopped else one_line(str(error), 500)
            self._show(state="idle", label=self._look.label if self._is_open else None, problem=problem)
        else:
            if not text and number > self._num_stopped:
                self._show(turns=(*asked, ChatTurn(chat.label, clean_text(""))))
            self._show(state="idle")
        if self._look.turns == asked:
            self._show(turns=before, question=question)

    def _opened(self) -> Chat:
        """The conversation, with its version loaded. Raises ActionError."""
        from daemons.chat import Chat

        if self._chat is None:
            self._chat = Chat(self._output_dir, self._target, self._settings)
        if not self._is_open:
            self._chat.open()
            self._is_open = True
        return self._chat

    def _choose(self, target: str) -> None:
        questions = [turn.text for turn in self._look.turns if turn.name is None]
        self._unload()
        self._chat, self._target = None, target
        self._look = ChatLook(one_line(target))
        self._show(question=questions[-1] if questions else "")

    def _reset(self) -> None:
        if self._chat is not None:
            self._chat.reset()
        self._show(turns=(), problem=None, question="")

    def _leave(self) -> None:
        self._unload()
        self._show(label=None)

    def _unload(self) -> None:
        if self._chat is not None and self._is_open:
            self._is_open = False
            self._chat.close()

    def _show(self, **changes: Any) -> None:
        self._look = replace(self._look, **changes)
        self._post(ChatChanged(self._look))


UNDER_WAY = "an answer is under way: esc stops it"


def head(look: ChatLook) -> Text:
    """The model that answers, and whether it is loaded."""
    newest = "" if "@" in look.target or look.target == "base" else ", its newest version,"
    if look.state == "loading":
        return Text.assemble(("◌ ", "secondary"), look.target, (f"{newest} is being loaded", "muted"))
    if look.label is None:
        return Text.assemble(("◌ ", "muted"), look.target, (f"{newest} is loaded with the next question", "muted"))
    state = "answers" if look.state == "answering" else "is loaded"
    return Text.assemble(("● ", "success"), look.label, (f" {state}", "muted"))


def describe(look: ChatLook) -> Text:
    """The conversation so far, turn by turn."""
    text = Text()
    for number, turn in enumerate(look.turns):
        text.append("\n\n" if number else "")
        text.append(f"── {turn.name or 'you'} ──\n", "bold accent" if turn.name else "bold primary")
        text.append(turn.text or "(nothing)", "" if turn.text else "muted")
    return text


class ChatView(Vertical, can_focus=False):
    """Has the keys through its line, or through the turns.

    Args:
        run_id: its newest version answers, until another is chosen.
    """

    DEFAULT_CSS = """
    ChatView {
        background: $surface; padding: 0 1;
        & > #chat-head { height: 1; background: $background; }
        & > VerticalScroll { height: 1fr; padding: 1 0; scrollbar-size-vertical: 1; background: $surface; }
        & > VerticalScroll > Static { height: auto; }
        & > #chat-problem { height: auto; max-height: 3; color: $text-error; display: none; }
        & > #chat-problem.-shown { display: block; }
        & > Input { background: $panel; padding: 0 1; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+t", "version", "Version", tooltip="the version that answers"),
        Binding("ctrl+r", "reset", "New chat", tooltip="forget the conversation"),
        Binding(
            "escape", "leave", "Back", key_display="esc", tooltip="stop the answer; then leave the line; then back"
        ),
        Binding("enter,i", "write", "Write", show=False, tooltip="ask; in the line"),
        Binding("up,k", "read(-1)", "Up", show=False),
        Binding("down,j", "read(1)", "Down", show=False),
        Binding("pageup,b", "read_page(-1)", "Page up", show=False),
        Binding("pagedown,space", "read_page(1)", "Page down", show=False),
    ]

    class ChooseVersion(Message):
        """Another version is to answer."""

    def __init__(self, output_dir: Path, run_id: str) -> None:
        super().__init__(id="chat")
        self.talk = ChatTalk(output_dir, run_id, self.post_message)
        self.line = Input(placeholder="type a question", compact=True)
        self.look = ChatLook(one_line(run_id))
        self._head = Clipped(id="chat-head", markup=False)
        self._turns = VerticalScroll(can_focus=True)
        self._text = Clipped(markup=False)
        self._problem = Clipped(id="chat-problem", markup=False)
        self._is_running = False
        self._may_refill = False
        self._is_early = False

    def compose(self) -> ComposeResult:
        """Yield the head, the turns, the text of a problem and the line for a question."""
        yield self._head
        with self._turns:
            yield self._text
        yield self._problem
        yield self.line

    def on_mount(self) -> None:
        """Anchor the turns to their end; show the conversation."""
        self._turns.anchor()
        self.show(self.look)

    def on_unmount(self) -> None:
        """Stop the answer and let the thread end, which unloads the version."""
        self.talk.end()

    def focus(self, scroll_visible: bool = True) -> Self:
        """Focus the line for a question, and return the view."""
        self.line.focus(scroll_visible)
        return self

    def show(self, look: ChatLook) -> None:
        """Show `look`; after a question or a choice its `question` fills the line once, if the line is empty."""
        self.look = look
        self._head.update(head(look))
        self._text.update(describe(look))
        self._is_early = self._is_early and look.state != "idle"
        problem = UNDER_WAY if self._is_early else look.problem
        self._problem.update(Content(problem or ""))
        self._problem.set_class(problem is not None, "-shown")
        if look.question and self._may_refill and not self.line.value:
            self._may_refill = False
            self.line.value = look.question
            self.line.cursor_position = len(look.question)

    def on_chat_changed(self, message: ChatChanged) -> None:
        """Show what the conversation posts; dropped before the view is mounted."""
        if self.is_mounted:
            self.show(message.look)

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if not event.value.strip():
            return
        if self.look.state != "idle":
            self._is_early = True
            self.show(self.look)
            return
        self.line.clear()
        self._may_refill = True
        self._turns.anchor()
        self._start()
        self.talk.ask(event.value)

    def choose(self, target: str) -> None:
        """Have `target` answer: a run (its newest version), `run_a@v3`, or "base".

        The turns are dropped; the last question comes back into the line.
        """
        self._may_refill = True
        self._start()
        self.talk.choose(target)

    def _start(self) -> None:
        """The thread of the conversation: a tab that is only looked at needs none."""
        if not self._is_running:
            self._is_running = True
            self.run_worker(self.talk.run, thread=True, name="chat")

    def action_version(self) -> None:
        """Post `ChooseVersion`: the screen lets the user choose the version that answers."""
        self.post_message(self.ChooseVersion())

    def action_reset(self) -> None:
        """Stop the answer and forget the conversation; the version stays loaded."""
        self._may_refill = False
        self.talk.reset()

    def action_leave(self) -> None:
        """Stop the answer; without one go from the line to the turns, and from there leave the screen."""
        if self.look.state != "idle":
            self.talk.stop()
        elif self.line.has_focus:
            self._turns.focus()
        else:
            self.app.pop_screen()

    def action_write(self) -> None:
        """Focus the line for a question."""
        self.line.focus()

    def action_read(self, direction: int) -> None:
        """Scroll the turns by `direction` rows."""
        self._turns.scroll_relative(y=direction, animate=False)

    def action_read_page(self, direction: int) -> None:
        """Scroll the turns by their height less one row."""
        self._turns.scroll_relative(y=direction * max(self._turns.size.height - 1, 1), animate=False)
