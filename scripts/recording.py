"""A recording of `prl-tui` as one animated SVG: `screenshots.py` makes it from a real demo.

Frames stand side by side in one film, which jumps from each to the next. A line that looks the same in several frames
is stored once. Nothing is drawn for it: all comes from the console's own screens.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from textual._compositor import LayoutUpdate
from textual.pilot import Pilot

# Pixels of a cell, of the line below the screen, and of the font.
CELL_WIDTH, CELL_HEIGHT, CAPTION_HEIGHT, FONT_SIZE = 7.2, 14.6, 26.0, 12
SAMPLE_S = 0.5
# Waiting for files is left out: a frame is shown no longer than this.
MOST_S = 2.5
MOST_BYTES = 1_500_000
BACK = "#121212"


@dataclass(frozen=True)
class Frame:
    """A screen from `at_s` on (seconds since the start): the look of each line, and what was done."""

    at_s: float
    lines: tuple[str, ...]
    caption: str


class Recorder:
    """Takes frames of an app. `do` is a key with its caption, or anything else that a person does."""

    def __init__(self, pilot: Pilot[None]) -> None:
        self._pilot = pilot
        self._began_s = time.monotonic()
        self._caption = ""
        self._colours: dict[str, str] = {}
        self.frames: list[Frame] = []

    async def press(self, caption: str, *keys: str, watch_s: float = 1.5) -> None:
        """Press `keys` under a caption, then take frames for `watch_s` seconds."""
        self._caption = caption
        await self._pilot.press(*keys)
        await self.watch(watch_s)

    async def do(self, caption: str, work: Callable[[], Awaitable[None]], watch_s: float = 1.5) -> None:
        """Await `work` under a caption, then take frames for `watch_s` seconds."""
        self._caption = caption
        await work()
        await self.watch(watch_s)

    async def watch(self, for_s: float) -> None:
        """Let the console go on for so long."""
        until = time.monotonic() + for_s
        while time.monotonic() < until:
            await self._pilot.pause(SAMPLE_S)
            self._look()

    def _look(self) -> None:
        app = self._pilot.app
        update = app.screen._compositor.render_update(full=True, screen_stack=app._background_screens)
        assert isinstance(update, LayoutUpdate)
        lines = tuple(self._line([part for strip in line for part in strip]) for line in update.strips)
        last = self.frames[-1] if self.frames else None
        if last is None or (last.lines, last.caption) != (lines, self._caption):
            self.frames.append(Frame(time.monotonic() - self._began_s, lines, self._caption))

    def _line(self, segments: list[Segment]) -> str:
        """One line of cells as SVG, at the height 0."""
        backs, texts, at = [], [], 0
        for segment in Segment.simplify(segments):
            width, style = segment.cell_length, segment.style or Style()
            front, back = self._colour(style.color, is_front=True), self._colour(style.bgcolor, is_front=False)
            if style.reverse:
                front, back = back, front
            x, length = f"{at * CELL_WIDTH:.4g}", f"{width * CELL_WIDTH:.4g}"
            if back != BACK:
                backs.append(f'<rect x="{x}" width="{length}" height="{CELL_HEIGHT}" class="{self._name(back)}"/>')
            if segment.text.strip():
                bold = " b" if style.bold else ""
                words = escape(segment.text)
                texts.append(f'<text x="{x}" textLength="{length}" class="{self._name(front)}{bold}">{words}</text>')
            at += width
        return "".join([*backs, *texts])

    @staticmethod
    def _colour(colour: Color | None, *, is_front: bool) -> str:
        if colour is None or colour.is_default:
            return "#c5c8c6" if is_front else BACK
        return colour.get_truecolor(SVG_EXPORT_THEME).hex

    def _name(self, colour: str) -> str:
        return self._colours.setdefault(colour, f"c{len(self._colours)}")

    def save(self, path: Path, size: tuple[int, int]) -> Path:
        """On a slow machine there is more to see: frames are left out then, but none with which something is done.

        Raises ValueError for a recording that is too large for a document even so.
        """
        frames = self.frames
        while len((data := film(frames, self._colours, size)).encode()) > MOST_BYTES:
            fewer = [
                each for index, each in enumerate(frames) if index % 2 == 0 or each.caption != frames[index - 1].caption
            ]
            if len(fewer) == len(frames):
                raise ValueError(f"{path.name}: {len(data.encode())} bytes in {len(frames)} frames: record less")
            frames = fewer
        path.write_text(data, encoding="utf-8")
        return path


def durations(frames: list[Frame]) -> list[float]:
    """How long each frame is shown; the last one as long as any may be."""
    ends = [frame.at_s for frame in frames[1:]]
    return [*(min(end - frame.at_s, MOST_S) for frame, end in zip(frames, ends, strict=False)), MOST_S]


def film(frames: list[Frame], colours: dict[str, str], size: tuple[int, int]) -> str:
    """The animated SVG of frames of `size` (cells)."""
    width, height = size[0] * CELL_WIDTH, size[1] * CELL_HEIGHT
    shown_s = durations(frames)
    total_s, at_s, moves = sum(shown_s), 0.0, []
    for index, duration_s in enumerate(shown_s):
        moves.append(f"{100 * at_s / total_s:.3f}%{{transform:translateX({-index * width:.1f}px)}}")
        at_s += duration_s
    names: dict[str, str] = {}
    pieces = []
    for index, frame in enumerate(frames):
        left = f"{index * width:.1f}"
        for y, line in enumerate(frame.lines):
            if line:
                name = names.setdefault(line, f"l{len(names)}")
                pieces.append(f'<use href="#{name}" x="{left}" y="{y * CELL_HEIGHT:.1f}"/>')
        below = height + CAPTION_HEIGHT - 9
        pieces.append(f'<text class="say" x="{index * width + 8:.1f}" y="{below:.1f}">{escape(frame.caption)}</text>')
    style = "".join(
        [
            f"text{{font:{FONT_SIZE}px 'DejaVu Sans Mono',Menlo,Consolas,monospace;white-space:pre;"
            f"dominant-baseline:text-before-edge}}.b{{font-weight:bold}}",
            ".say{font-weight:bold;fill:#ffffff;dominant-baseline:auto}",
            *(f".{name}{{fill:{colour}}}" for colour, name in colours.items()),
            f"#film{{animation:film {total_s:.2f}s step-end infinite}}@keyframes film{{{''.join(moves)}}}",
        ]
    )
    lines = "".join(f'<g id="{name}">{line}</g>' for line, name in names.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.1f} {height + CAPTION_HEIGHT:.1f}">'
        f"<style>{style}</style><defs>{lines}</defs>"
        f'<rect width="100%" height="100%" fill="{BACK}"/>'
        f'<rect y="{height:.1f}" width="100%" height="{CAPTION_HEIGHT}" fill="#30343f"/>'
        f'<g id="film">{"".join(pieces)}</g></svg>\n'
    )
