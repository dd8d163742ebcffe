"""A job: work for a thread, the shell command that does the same, and the thread's report to the app. No screens."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from prime_rl.utils.text import CleanText, clean_text, one_line
from tui.messages import ActionChanged, ActionEntry, ActionState

Progress = Callable[[str], None]
Work = Callable[[Progress], str]
# Deletions wait for the trainer; done side by side they wait together.
NUM_AT_ONCE = 8
MAX_NAMED = 3


@dataclass(frozen=True)
class Job:
    """`work(progress)` runs in a thread and returns a message of what it did; `command` does the same in a shell."""

    command: CleanText
    work: Work


Perform = Callable[[Job], int]


def prl_command(output_dir: Path, *words: str) -> CleanText:
    """The shell command of an action; it names the workspace unless `prl` would find it by itself."""
    default = os.environ.get("PRL_OUTPUT_DIR") or "outputs"
    # Without a look at the disk: this is for the thread that draws.
    is_default = os.path.abspath(output_dir) == os.path.abspath(default)
    where = [] if is_default else ["--output-dir", str(output_dir)]
    return one_line(shlex.join(("prl", *words, *where)), 4000)


def name_runs(run_ids: Sequence[str]) -> str:
    """`run_a`, or `7 runs`."""
    return run_ids[0] if len(run_ids) == 1 else f"{len(run_ids)} runs"


def each(run_ids: Sequence[str], done: str, act: Callable[[str, Progress], str], *, at_once: int = NUM_AT_ONCE) -> Work:
    """Apply `act` to every run, also after one failed; raises ActionError that names the failed ones.

    A single run returns its own message; several are counted: "3 runs `done`".
    """

    def work(progress: Progress) -> str:
        if len(run_ids) == 1:
            return act(run_ids[0], progress)
        failed: list[str] = []

        def one(run_id: str) -> None:
            try:
                act(run_id, lambda words: progress(words))
            except (RuntimeError, OSError) as error:  # an ActionError is a RuntimeError
                failed.append(f"{run_id}: {error}")

        with ThreadPoolExecutor(at_once) as pool:
            for number, _ in enumerate(pool.map(one, run_ids), start=1):
                progress(f"{number} of {len(run_ids)}")
        if failed:
            from daemons.actions import ActionError

            more = f"; and {len(failed) - MAX_NAMED} more" if len(failed) > MAX_NAMED else ""
            raise ActionError(f"{len(failed)} of {len(run_ids)} failed: {'; '.join(failed[:MAX_NAMED])}{more}")
        return f"{len(run_ids)} runs {done}"

    return work


MAX_DETAIL_CHARS = 8_000


@dataclass
class JobWorker:
    """`run` is called in a thread; `post` takes messages from any thread."""

    serial: int
    job: Job
    post: Callable[[ActionChanged], object]
    clock: Callable[[], float]

    def run(self) -> None:
        """Do the job and post its progress; an error that actions raise is posted as "failed"."""
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
