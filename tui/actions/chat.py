"""The conversation of one tab with a version of a run, in a thread of its own: `daemons.chat`, as in `prl chat`.

The version is loaded with the first question, and unloaded when the tab is left. Not imported when read-only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from prime_rl.utils.text import clean_text, one_line
from tui.messages import ChatChanged, ChatLook, ChatTurn

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
