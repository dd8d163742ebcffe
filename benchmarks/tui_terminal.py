"""A program in a pseudo terminal, and what it has drawn: enough of a terminal to time when something is on the screen.

It understands what full-screen programs write: moving the cursor, erasing, scrolling, colours. Of each cell it keeps
the character and its background, so that a moved cursor bar is seen too. It answers what they ask first.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_TOKEN = re.compile(
    r"\x1b\[(?P<private>[?<=>]?)(?P<arguments>[0-9;:]*)(?P<between>[ -/]*)(?P<final>[@-~])"
    r"|\x1b[\]PX^_](?P<string>[^\x07\x1b]*)(?:\x07|\x1b\\)"
    r"|\x1b(?P<escape>[ -/]*[0-Z\\^-~])"
    r"|(?P<control>[\x00-\x1a\x1c-\x1f\x7f])"
    r"|(?P<text>[^\x00-\x1f\x7f]+)"
)
_ANSWERS = {
    "c": "\x1b[?62;22c",  # who are you: a VT220 with colours
    "6n": "\x1b[1;1R",  # where is the cursor
    "?2026$p": "\x1b[?2026;2$y",  # synchronised output: known, off
    "?2048$p": "\x1b[?2048;0$y",  # size reports in band: not known
}
_COLOURS = {"10;?": "\x1b]10;rgb:c8c8/d3d3/f5f5\x1b\\", "11;?": "\x1b]11;rgb:1616/1616/1e1e\x1b\\"}


class Screen:
    """Characters and backgrounds of `height` rows of `width` cells."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.chars = [[" "] * width for _ in range(height)]
        self.backs = [[""] * width for _ in range(height)]
        self.title = ""
        self.answers: list[str] = []
        self._x = self._y = 0
        self._back = ""
        self._reverse = False
        self._rest = ""

    def text(self, row: int | None = None) -> str:
        """The characters of `row`, or of all rows, one a line."""
        rows = self.chars if row is None else [self.chars[row]]
        return "\n".join("".join(line) for line in rows)

    def find(self, words: str) -> int | None:
        """The number of the first row that has `words`, or None."""
        return next((y for y in range(self.height) if words in self.text(y)), None)

    def feed(self, data: str) -> None:
        """Draw what the program wrote, and add answers to its questions to `answers`.

        The beginning of an escape sequence is kept until its rest comes.
        """
        data, self._rest, at = self._rest + data, "", 0
        while at < len(data):
            token = _TOKEN.match(data, at)
            if token is None:
                if len(data) - at > 4096:  # no sequence is that long: drop the escape
                    at += 1
                    continue
                self._rest = data[at:]
                return
            at = token.end()
            self._take(token)

    def _take(self, token: re.Match[str]) -> None:
        if (text := token["text"]) is not None:
            self._write(text)
        elif (control := token["control"]) is not None:
            self._control(control)
        elif token["final"]:
            self._sequence(token["private"], token["arguments"], token["between"], token["final"])
        elif (string := token["string"]) is not None:
            if string in _COLOURS:
                self.answers.append(_COLOURS[string])
            elif string[:2] in ("0;", "2;"):
                self.title = string[2:]

    def _write(self, text: str) -> None:
        for char in text:
            if unicodedata.combining(char):
                continue
            if self._x >= self.width:
                self._x = 0
                self._line_feed()
            back = f"reverse {self._back}" if self._reverse else self._back
            self.chars[self._y][self._x], self.backs[self._y][self._x] = char, back
            self._x += 1
            if unicodedata.east_asian_width(char) in "WF" and self._x < self.width:
                self.chars[self._y][self._x], self.backs[self._y][self._x] = "", back
                self._x += 1

    def _control(self, char: str) -> None:
        if char == "\r":
            self._x = 0
        elif char == "\n":
            self._line_feed()
        elif char == "\b":
            self._x = max(self._x - 1, 0)
        elif char == "\t":
            self._x = min((self._x // 8 + 1) * 8, self.width - 1)

    def _line_feed(self) -> None:
        if self._y < self.height - 1:
            self._y += 1
            return
        self.chars = [*self.chars[1:], [" "] * self.width]
        self.backs = [*self.backs[1:], [""] * self.width]

    def _sequence(self, private: str, arguments: str, between: str, final: str) -> None:
        if answer := _ANSWERS.get(f"{private}{arguments}{between}{final}"):
            self.answers.append(answer)
        if private or between:
            return
        numbers = [int(number) if number.isdigit() else 0 for number in arguments.replace(":", ";").split(";")]
        first = max(numbers[0], 1)
        if final == "m":
            self._style(numbers)
        elif final in "Hf":
            self._y = min(first, self.height) - 1
            self._x = min(max(numbers[1] if len(numbers) > 1 else 1, 1), self.width) - 1
        elif final in "ABCDEFG`d":
            self._move(final, first)
        elif final in "JKX":
            self._erase(final, numbers[0])

    def _move(self, final: str, by: int) -> None:
        if final in "EF":
            self._x = 0
        if final in "AF":
            self._y = max(self._y - by, 0)
        elif final in "BE":
            self._y = min(self._y + by, self.height - 1)
        elif final == "C":
            self._x = min(self._x + by, self.width - 1)
        elif final == "D":
            self._x = max(self._x - by, 0)
        elif final in "G`":
            self._x = min(by, self.width) - 1
        else:
            self._y = min(by, self.height) - 1

    def _erase(self, final: str, mode: int) -> None:
        if final == "X":
            self._blank(self._y, self._x, min(self._x + max(mode, 1), self.width))
            return
        start, end = (0 if mode else self._x), (self.width if mode != 1 else self._x + 1)
        self._blank(self._y, start, end)
        if final == "J":
            others = {0: range(self._y + 1, self.height), 1: range(self._y)}.get(mode, range(self.height))
            for row in others:
                self._blank(row, 0, self.width)

    def _blank(self, row: int, start: int, end: int) -> None:
        self.chars[row][start:end] = [" "] * (end - start)
        self.backs[row][start:end] = [self._back] * (end - start)

    def _style(self, numbers: list[int]) -> None:
        at = 0
        while at < len(numbers):
            number = numbers[at]
            width = {2: 5, 5: 3}.get(numbers[at + 1], 1) if number in (38, 48) and at + 1 < len(numbers) else 1
            if number == 48:
                self._back = ";".join(map(str, numbers[at : at + width]))
            elif number == 0:
                self._back, self._reverse = "", False
            elif number in (7, 27):
                self._reverse = number == 7
            elif number == 49:
                self._back = ""
            elif 40 <= number <= 47 or 100 <= number <= 107:
                self._back = str(number)
            at += width


class Terminal:
    """`argv` in a pseudo terminal. `started_at` is the moment (`time.perf_counter`) before the process was made."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        size: tuple[int, int] = (200, 50),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.screen = Screen(*size)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        # These two would count more than the size of the terminal.
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        words = {**inherited, "TERM": "xterm-256color", "COLORTERM": "truecolor", "LC_ALL": "C.UTF-8", **(env or {})}
        self.started_at = time.perf_counter()
        self.process = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=words, cwd=cwd
        )
        os.close(theirs)

    def press(self, keys: str) -> None:
        """Send `keys` to the program as if they were typed."""
        os.write(self._fd, keys.encode())

    def wait(self, condition: Callable[[Screen], object], what: str, *, timeout_s: float = 60.0) -> float:
        """Read until `condition(screen)`; the moment (`time.perf_counter`) at which what made it true had come."""
        deadline = time.perf_counter() + timeout_s
        while not condition(self.screen):
            if time.perf_counter() > deadline or not self.read(0.05):
                raise TimeoutError(f"{what} did not come; on the screen:\n{self.screen.text()}")
        return self._read_at

    _read_at = 0.0

    def read(self, wait_s: float) -> bool:
        """Take what comes within `wait_s`; False when the program has ended."""
        if not select.select([self._fd], [], [], wait_s)[0]:
            return self.process.poll() is None
        try:
            data = os.read(self._fd, 1 << 18)
        except OSError:
            return False
        self._read_at = time.perf_counter()
        self.screen.feed(self._decoder.decode(data))
        for answer in self.screen.answers:
            self.press(answer)
        self.screen.answers.clear()
        return True

    def drain(self, for_s: float) -> None:
        """Let the program draw for so long."""
        deadline = time.perf_counter() + for_s
        while (left := deadline - time.perf_counter()) > 0 and self.read(left):
            pass

    def close(self) -> None:
        """Kill the program and its process group, and close the terminal; it may have ended before."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._fd)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
