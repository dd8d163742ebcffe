"""`prl-tui` as a child that shares our terminal; whatever happens to it, the terminal is usable afterwards."""

from __future__ import annotations

import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

from prime_rl.utils.signals import EXIT_INTERRUPTED, EXIT_TERMINATED

# Leave the alternate screen; show the cursor; wrap long lines; no mouse, focus or paste reports; no key protocol; plain
# colours.
_RESET = "\x1b[?1049l\x1b[?25h\x1b[?7h\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?1004l\x1b[?2004l\x1b[<u\x1b[0m"
_END_S = 5.0


class TuiChild:
    """Shows a workspace until it is closed or the person quits. With None it shows nothing.

    `interrupted`: the person left with Ctrl-C, which arrives as a key because the terminal is in raw mode. `options`
    are those of `prl-tui`.
    """

    def __init__(self, output_dir: Path | None, *options: str) -> None:
        self._output_dir = output_dir
        self._options = options
        self.interrupted = False
        self._child: subprocess.Popen[bytes] | None = None
        self._settings: list[object] | None = None

    def __enter__(self) -> TuiChild:
        if self._output_dir is not None:
            with suppress(termios.error):
                self._settings = termios.tcgetattr(sys.stdin.fileno())
            self._child = subprocess.Popen([sys.executable, "-m", "tui", str(self._output_dir), *self._options])
        return self

    def lives(self) -> bool:
        """Whether it is shown now; gives the terminal back as soon as it is not."""
        if self._child is not None and self._child.poll() is not None:
            self._restore()
        return self._child is not None

    def __exit__(self, *exc: object) -> None:
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._restore()

    def _restore(self) -> None:
        code = self._child.returncode if self._child is not None else None
        self.interrupted = code == EXIT_INTERRUPTED
        quit_by_itself = code in (0, EXIT_INTERRUPTED, EXIT_TERMINATED)
        self._child = None
        if not quit_by_itself:
            sys.stdout.write(_RESET)
            sys.stdout.flush()
        if self._settings is not None:
            with suppress(termios.error):
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._settings)  # type: ignore[arg-type]
