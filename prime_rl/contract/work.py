"""`work.json`: what a daemon works on, noted before it begins, so that what ended it has a name.

One file a daemon, one writer, rewritten only when the set changes; a process that ends by itself, or is killed, leaves
it behind. The next process begins with the runs that it names as suspects and works for each of them apart, until that
run has proven harmless. So a note with a suspect in it names the one run that was in work at the end.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from prime_rl.contract.files import read_file, write_atomic
from prime_rl.utils.process import ProcessId

MAX_NOTE_BYTES = 1_000_000


class Item(msgspec.Struct, frozen=True, order=True):
    """One thing in work, such as `served run_a@v3`. `run_id` is "" where it belongs to no run that is known."""

    run_id: str
    what: str


class Work(msgspec.Struct, kw_only=True):
    """The content of a note.

    `suspects`: at how many deaths in a row each was in work, without a proof since; `cleared`: the same of those that
    have proven harmless, for what ends a process later than its proof.
    """

    version: int = 1
    writer: ProcessId = ProcessId(0)
    items: list[Item] = []
    suspects: dict[str, int] = {}
    cleared: dict[str, int] = {}

    @property
    def suspected(self) -> list[Item]:
        """The work of suspects: of one run at most."""
        return [item for item in self.items if item.run_id in self.suspects]


def read_work(path: Path) -> Work | None:
    """The note in `path`; None when it is missing or damaged."""
    try:
        return msgspec.json.decode(read_file(path, limit=MAX_NOTE_BYTES), type=Work)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None


class WorkNote:
    """The one writer of one note, for one thread; it begins with what the process before left there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = ProcessId.of(os.getpid())
        left = read_work(path) or Work()
        in_work = left.suspected or left.items
        deaths = left.cleared | left.suspects
        self.suspects = {item.run_id: deaths.get(item.run_id, 0) + 1 for item in in_work}
        self.cleared: dict[str, int] = {}

    def write(self, items: Iterable[Item]) -> None:
        """Replace the note. Work goes on when that fails, without a note: an older one would name the wrong run."""
        work = Work(writer=self._writer, items=sorted(items), suspects=self.suspects, cleared=self.cleared)
        try:
            write_atomic(self._path, msgspec.json.encode(work), durable=False)
        except OSError:
            with contextlib.suppress(OSError):
                self._path.unlink()

    @contextlib.contextmanager
    def alone(self, item: Item) -> Iterator[None]:
        """Work on one item, and on nothing else: a process that gets through it has proven its run harmless."""
        self.write([item])
        try:
            yield
        finally:
            self.suspects.pop(item.run_id, None)
            self.write(())
