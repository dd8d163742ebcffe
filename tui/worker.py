"""One job in its own thread: it reports progress and failures to the app."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prime_rl.utils.text import clean_text, one_line
from tui.jobs import Job
from tui.messages import ActionChanged, ActionEntry, ActionState

MAX_DETAIL_CHARS = 8_000


@dataclass
class JobWorker:
    """`run` is called in a thread; `post` takes messages from any thread."""

    serial: int
    job: Job
    post: Callable[[ActionChanged], object]
    clock: Callable[[], float]

    def run(self) -> None:
        self._say("running", "...")
        try:
            text = self.job.work(lambda progress: self._say("running", progress))
        # What actions raise: ActionError, LaunchError, ConfigError, and OSError.
        except (RuntimeError, OSError, ValueError) as error:
            self._say("failed", str(error))
        else:
            self._say("done", text)

    def _say(self, state: ActionState, text: str) -> None:
        detail = clean_text(text.strip(), MAX_DETAIL_CHARS)
        first = one_line(detail.partition("\n")[0], 400)
        self.post(ActionChanged(ActionEntry(self.serial, self.job.command, state, first, detail, self.clock())))
