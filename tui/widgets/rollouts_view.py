"""The rollouts that a run keeps, in three views.

A list in a chosen order with the one under the cursor turn by turn; all of its example side by side, with their tokens
in colours; the rewards of its batch as a histogram. The cursor of the list is the place in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Resize
from textual.widgets import Input, Static

from prime_rl.contract.metrics import bounded_mean
from prime_rl.contract.samples import Sample
from tui import fmt
from tui.messages import TabAsked
from tui.model.query import TINTS, SampleQuery, make_tint, parse_search, tinted
from tui.readers.rollouts import (
    ORDERS,
    RolloutsData,
    RolloutsRequest,
    TokenLine,
    arrange,
    branch_of,
    by_rollout,
    group_key,
    group_of,
    step_rewards,
    turns,
    versions,
)
from tui.readers.tabs import ROLLOUTS
from tui.widgets.line_list import Clipped, LineList

# From this width on the list has room for what else is known of each.
WIDE = 120
LIST, GROUP, REWARDS = VIEWS = ("list", "group", "rewards")


def list_row(sample: Sample, *, wide: bool, is_hit: bool = False, is_text: bool = False) -> Text:
    """`   87  0.333  -0.577`: step, reward, advantage; wide also environment, versions and length.

    Of a text to learn its tokens and its name.

    A branch stands below the first one of its rollout, as `├ branch 2 of 3`.
    """
    step = "" if sample.branch else sample.step
    text = Text.assemble((f"{step:>6}", "muted"), ("*" if is_hit else " ", "bold accent"), no_wrap=True)
    if sample.branch:
        mark = "└" if sample.branch + 1 == sample.num_branches else "├"
        text.append(f" {mark} {branch_of(sample)}".ljust(16), "muted")
    elif is_text:
        text.append(f"{sample.num_completion_tokens:>7} ").append(fmt.shorten(sample.example_id, 60), "muted")
    else:
        text.append(f"{fmt.reward(sample.reward):>7} ")
        text.append(f"{fmt.gain(sample.advantage):>8}", "success" if sample.advantage > 0 else "warning")
    if wide and not is_text:
        text.append(f"  {versions(sample):<12} {sample.num_completion_tokens:>5}  ", "muted")
        text.append(fmt.shorten(sample.env, 40))
    return text


def describe(sample: Sample, words: Sequence[str] = (), *, is_text: bool = False) -> Text:
    """The sample turn by turn, with `words` marked: what it shares with an earlier branch in one line."""
    version = "" if is_text else versions(sample)
    facts = [f"step {sample.step}", branch_of(sample), version, f"{sample.num_completion_tokens} tokens"]
    figures = (
        ("reward ", "muted"),
        (fmt.reward(sample.reward), "bold"),
        ("  advantage ", "muted"),
        (fmt.gain(sample.advantage), "bold success" if sample.advantage > 0 else "bold warning"),
    )
    text = Text.assemble(
        *([("text to learn", "bold")] if is_text else figures),
        ("\n" + " · ".join(filter(None, facts)), "muted"),
        (f"\n{fmt.shorten(sample.env, 60)} · {fmt.shorten(sample.example_id, 80)}\n", "muted"),
    )
    colours = {"prompt": "primary", "policy": "accent", "environment": "secondary"}
    if sample.num_shared:
        shared = f"the first {fmt.counted(sample.num_shared, 'token')} as in branch {sample.shared_with + 1}"
        text.append(f"\n── {shared} ──\n", "muted")
    conversation = turns(sample)
    for number, turn in enumerate(conversation):
        place = f" {number} of {len(conversation) - 1}" if number and len(conversation) > 2 else ""
        reward = "" if turn.reward is None else f", reward {fmt.reward(turn.reward)}"
        speaker = "completion" if is_text and turn.speaker == "policy" else turn.speaker
        text.append(f"\n── {speaker}{place}{reward} ──\n", f"bold {colours[turn.speaker]}")
        text.append(turn.text or "(nothing)", "" if turn.text else "muted").append("\n")
    if sample.output:
        text.append("\n── output of the agent ──\n", "bold secondary").append(sample.output.strip("\n")).append("\n")
    if words:
        text.highlight_words(words, "bold reverse", case_sensitive=False)
    return text


def next_place(keys: Sequence[Hashable], allowed: Sequence[int], cursor: int, direction: int) -> int:
    """From `cursor` the next place with another key, or the one before; `cursor` where there is none.

    A key stands where it is first. `allowed`: the places that count, ascending.
    """
    firsts: dict[Hashable, int] = {}
    for index in allowed:
        firsts.setdefault(keys[index], index)
    here = firsts.get(keys[cursor], cursor) if cursor < len(keys) else cursor
    places = sorted(firsts.values())
    if direction > 0:
        return next((place for place in places if place > here), cursor)
    return next((place for place in reversed(places) if place < here), cursor)


class Page(VerticalScroll, can_focus=True):
    """One picture, which scrolls."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", "Down", show=False),
        Binding("k", "scroll_up", "Up", show=False),
        Binding("g", "scroll_home", "Start", show=False),
        Binding("G", "scroll_end", "End", show=False),
    ]


class RolloutsView(Vertical, can_focus=False):
    """Has the keys through its list, or its page."""

    DEFAULT_CSS = """
    RolloutsView {
        background: $surface;
        & > #about { height: auto; max-height: 3; padding: 0 1; display: none; }
        & > #about.-shown { display: block; }
        & > Horizontal { height: 1fr; }
        & > Horizontal > LineList { width: 27; height: 1fr; background: $surface; }
        &.-wide > Horizontal > LineList { width: 62; }
        & > Horizontal > VerticalScroll {
            width: 1fr; border-left: solid $border; padding: 0 1; scrollbar-size-vertical: 1;
        }
        & > Horizontal > Page { display: none; border-left: none; background: $surface; }
        & > Horizontal > VerticalScroll > Static { height: auto; }
        &.-page > Horizontal > * { display: none; }
        &.-page > Horizontal > Page { display: block; }
        & > Input { display: none; height: 1; padding: 0 1; background: $panel; }
        &.-asking > Input { display: block; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "view", "View", tooltip="the list, one example side by side, the rewards of a step"),
        Binding("t", "tint", "Colours", tooltip="tokens coloured by advantage, log-ratio, surprise"),
        Binding("o", "order", "Order", tooltip="order: newest, reward, advantage"),
        Binding("slash", "ask", "Search", key_display="/", tooltip="search: words, reward>0.5, env:NAME, step:12"),
        Binding("n", "move(1)", "Next", tooltip="next rollout, example or step; of a search the next found"),
        Binding("N,p", "move(-1)", "Previous", key_display="N"),
        Binding("less_than_sign,comma", "go(-1)", "Earlier step", show=False),
        Binding("greater_than_sign,full_stop", "go(1)", "Later step", show=False),
        Binding("space,J", "read(1)", "Read on", show=False),
        Binding("b,K", "read(-1)", "Read back", show=False),
        Binding("escape", "leave", "Back", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(id="rollouts")
        self.list = LineList[Sample]("no rollouts are kept yet")
        self.page = Page(can_focus=True)
        self.input = Input(placeholder="words, or reward>0.5 env:math step:12", compact=True)
        self.are_texts = False
        """The run learns texts: without rewards, in one view."""
        self.order, self.view, self.tint = ORDERS[0], VIEWS[0], TINTS[0]
        self.request = RolloutsRequest()
        self.search = SampleQuery()
        self.data = RolloutsData("")
        self._about = Clipped(id="about", markup=False)
        self._detail = VerticalScroll(can_focus=False)
        self._text, self._picture = Static(markup=False), Static(markup=False)
        self._hits: Sequence[int] = ()
        self._described: object = None

    def compose(self) -> ComposeResult:
        """Yield the line above, the list and the rollout beside it, the page of the other views, and the search."""
        yield self._about
        with Horizontal():
            yield self.list
            with self._detail:
                yield self._text
            with self.page:
                yield self._picture
        yield self.input

    def on_mount(self) -> None:
        """Keep the search from taking the focus before `action_ask`; fill the list again whenever the theme changes."""
        self.input.can_focus = False
        self.app.theme_changed_signal.subscribe(self, lambda _: self._fill())

    @property
    def selected(self) -> Sample | None:
        """The rollout under the cursor; None while the list is empty."""
        return self.list.selected

    def take_focus(self) -> None:
        """Focus the list, or in the other views the page."""
        (self.list if self.view == LIST else self.page).focus()

    def show(self, data: RolloutsData) -> None:
        """Fill the list with `data`; the cursor stays on its rollout.

        In the order "newest" a cursor at the top stays at the top, unless one example is shown side by side.
        """
        self.data = data
        self._fill()

    def on_resize(self, event: Resize) -> None:
        """Fill the list again, with more columns from WIDE cells on."""
        self.set_class(event.size.width >= WIDE, "-wide")
        self._fill()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Allow `tint` only while one example is shown side by side; else Textual hides its key."""
        return action != "tint" or self.view == GROUP

    def action_view(self) -> None:
        """Open the next of VIEWS, after the last the first."""
        self._open(LIST if self.are_texts else VIEWS[(VIEWS.index(self.view) + 1) % len(VIEWS)])

    def action_tint(self) -> None:
        """Colour tokens by the next of TINTS, after the last the first."""
        self.tint = TINTS[(TINTS.index(self.tint) + 1) % len(TINTS)]
        self._describe()

    def action_order(self) -> None:
        """Order the list by the next of ORDERS, and move the cursor to its top."""
        self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
        self._fill(from_top=True)

    def action_move(self, num: int) -> None:
        """To the next rollout, example or step, by the view; while there is a search, of those that it found."""
        samples = self.list.keys
        keys: Sequence[Hashable] = range(len(samples))
        if self.view != LIST:
            keys = [group_key(each) if self.view == GROUP else each.step for each in samples]
        allowed = self._hits if self.search.text else range(len(samples))
        self.list.action_move(next_place(keys, allowed, self.list.cursor, num) - self.list.cursor)

    def action_go(self, direction: int) -> None:
        """To the first rollout of the next later or earlier step."""
        steps = [sample.step for sample in self.list.keys]
        if steps:
            here = steps[self.list.cursor]
            others = {step for step in steps if (step > here) == (direction > 0) and step != here}
            if others:
                place = steps.index(min(others) if direction > 0 else max(others))
                self.list.action_move(place - self.list.cursor)

    def action_read(self, direction: int) -> None:
        """Scroll the rollout, or in the other views the page, by its height less one row."""
        page = self._detail if self.view == LIST else self.page
        page.scroll_relative(y=direction * max(page.size.height - 1, 1), animate=False)

    def action_ask(self) -> None:
        """Show the input of the search, empty, and focus it."""
        self.add_class("-asking")
        self.input.value = ""
        self.input.can_focus = True
        self.input.focus()

    def action_leave(self) -> None:
        """Close the search, forget it, go back to the list; then leave."""
        if self.has_class("-asking"):
            self._close_input()
        elif self.search.text:
            self._look_for("")
        elif self.view != LIST:
            self._open(LIST)
        else:
            self.app.pop_screen()

    @on(Input.Submitted)
    def _asked(self, event: Input.Submitted) -> None:
        event.stop()
        self._close_input()
        self._look_for(event.value)

    def _look_for(self, text: str) -> None:
        self.search = parse_search(text)
        self._fill()
        if text and self._hits and self.list.cursor not in self._hits:
            place = next((each for each in self._hits if each > self.list.cursor), self._hits[0])
            self.list.action_move(place - self.list.cursor)

    def _close_input(self) -> None:
        self.remove_class("-asking")
        self.input.can_focus = False
        self.take_focus()

    def _open(self, view: str) -> None:
        self.view = view
        self.set_class(view != LIST, "-page")
        self.take_focus()
        self._describe()
        self.screen.refresh_bindings()

    def _fill(self, *, from_top: bool = False) -> None:
        if not self.data.run_id:
            return  # nothing is read yet
        selected, arranged = self.selected, arrange(self.data.samples, self.order)
        # On top of the newest it stays on top; else, and beside others, it stays with the rollout that is read.
        follows = from_top or (self.order == "newest" and self.list.cursor == 0 and self.view != GROUP)
        place = 0 if follows or selected not in arranged else arranged.index(selected)
        search, wide = self.search, self.has_class("-wide")
        hits = {index for index, each in enumerate(arranged) if search.matches(each)} if search.text else set()
        self._hits = sorted(hits)
        columns = "  tokens text" if self.are_texts else "  reward   advant."
        head = "  step" + columns + ("  version      tokens environment" if wide and not self.are_texts else "")
        num = len(by_rollout(arranged))
        heading = (Text(f"{num}, {self.order} first" if arranged else ""), Text(head))
        self.list.show(
            arranged,
            lambda index: list_row(arranged[index], wide=wide, is_hit=index in hits, is_text=self.are_texts),
            heading,
            cursor=place,
        )
        self._described = None
        self._describe(is_new=selected != self.selected)

    @on(LineList.Moved)
    def _moved(self, event: LineList.Moved) -> None:
        event.stop()
        self._describe()

    def _describe(self, *, is_new: bool = True) -> None:
        """Show the rollout under the cursor in the view; from its start when it `is_new` there."""
        sample = self.selected
        request = RolloutsRequest(sample.step if sample is not None and self.view == GROUP else None)
        if request != self.request:
            self.request = request
            self.post_message(TabAsked(ROLLOUTS, request))
        head = self._head(sample)
        if self.search.text:
            head.append("\n" if head else "").append(self._found(), "error" if self.search.errors else "accent")
        self._about.set_class(bool(head), "-shown")
        self._about.update(head)
        self._draw(sample, is_new=is_new)

    def _head(self, sample: Sample | None) -> Text:
        if sample is None or self.view == LIST:
            return Text()
        if self.view == GROUP:
            return legend(self._group(sample))
        return rewards_head(sample.step, step_rewards(self.data).get(sample.step, ()))

    def _found(self) -> str:
        if self.search.errors:
            return f"/{self.search.text}: {self.search.errors[0]}"
        cursor, hits = self.list.cursor, self._hits
        num = len(by_rollout(self.list.keys[hit] for hit in hits))
        place = f"{hits.index(cursor) + 1} of {len(hits)}" if cursor in hits else fmt.counted(num, "rollout")
        return f"/{self.search.text}: {place if hits else 'not'} found"

    def _draw(self, sample: Sample | None, *, is_new: bool) -> None:
        drawn = (self.view, sample, self.tint)
        if drawn == self._described:
            return
        self._described = drawn
        if self.view == LIST or sample is None:
            self._text.update(describe(sample, self.search.words, is_text=self.are_texts) if sample else "")
            self._picture.update("")
            if is_new:
                self._detail.scroll_home(animate=False)
            return
        # The width without the scroll bar, which comes and goes with the height.
        width, height = self.size.width - 3, self.size.height - 1 - bool(self.search.text)
        if self.view == GROUP:
            self._picture.update(draw_group(self._group(sample), width))
        else:
            by_step = step_rewards(self.data)
            by_step = by_step if sample.step in by_step else {**by_step, sample.step: ()}
            self._picture.update(draw_rewards(by_step, sample.step, width, height))
        if is_new:
            self.page.scroll_home(animate=False)

    def _group(self, sample: Sample) -> GroupPicture:
        samples = self.data.samples
        keys = list(dict.fromkeys(group_key(each) for each in samples if each.step == sample.step))
        tokens = self.data.tokens if self.data.request.step == sample.step else {}
        place = (keys.index(group_key(sample)) + 1, len(keys))
        return GroupPicture(tuple(group_of(samples, sample)), sample, tokens, self.tint, place, self.search.words)


# Cells of a column: with fewer, lines break too often to be read.
MIN_COLUMN = 44
# Rollouts of one example, and characters of each: the list shows a rollout in full.
MAX_COLUMNS = 32
MAX_CHARS = 6_000
_BLOCKS = " ▁▂▃▄▅▆▇█"
# Cells before and after a row of blocks.
_BEFORE, _AFTER = 8, 16
# Styles of the levels above 0 and below, by their size. The strongest are underlined too, or reversed: without colour
# they must be seen, and told apart where the text beside them has no sign.
_ABOVE = ("", "success", "bold success", "bold success")
_BELOW = ("", "error", "bold error", "bold error")
_STYLES = {
    "advantage": (_ABOVE, _BELOW),
    "log-ratio": (_ABOVE, (*_BELOW[:3], "bold error reverse")),
    "surprise": (("", "warning", "bold warning", "bold warning"), _BELOW),
}


@dataclass(frozen=True)
class GroupPicture:
    """The content of an example's picture.

    Attributes:
        group: its rollouts, all or a part of them.
        chosen: the one under the cursor.
        tokens: by place.
        place: of the example among those of its batch, and how many these are.
        words: that are marked.
    """

    group: tuple[Sample, ...]
    chosen: Sample
    tokens: Mapping[int, TokenLine]
    tint: str
    place: tuple[int, int]
    words: tuple[str, ...] = ()

    @property
    def largest(self) -> float:
        """The largest advantage, absolute."""
        lines = [self.tokens[sample.place] for sample in self.group if sample.place in self.tokens]
        own = [abs(value) for line in lines for value in line.advantages if math.isfinite(value)]
        return max([abs(sample.advantage) for sample in self.group] + own)


def level_text(text: Text, piece: str, level: int | None, tint: str) -> None:
    """Append `piece` in the style of its level; `tint` is one of TINTS."""
    if level is None:
        text.append(piece, "muted")
        return
    above, below = _STYLES[tint]
    start, style = len(text), (below if level < 0 else above)[abs(level)]
    text.append(piece, style)
    if abs(level) == 3 and "reverse" not in style:
        text.stylize("underline", start, len(text))


def legend(picture: GroupPicture) -> Text:
    """`tokens by surprise, sampled at p<50% p<10% p<1%`, each mark in its style."""
    if not picture.tokens:
        return Text(f"no tokens of step {picture.chosen.step} are kept", "muted")
    tint = make_tint(picture.tint, 0.0, picture.largest)
    text = Text.assemble(("tokens by ", "muted"), (picture.tint, "bold"), (f", {tint.about}", "muted"))
    for mark, level in tint.legend():
        text.append(" ")
        level_text(text, mark, level, picture.tint)
    return text


def draw_group(picture: GroupPicture, width: int) -> RenderableType:
    """The prompt, then the rollouts: as many beside each other as there is room for."""
    number, num_groups = picture.place
    first = next((each for each in picture.group if not each.branch), picture.group[0])
    num_rollouts = fmt.counted(len(picture.group), "rollout")
    head = Text.assemble(
        (f"step {first.step} · example {number} of {num_groups} · {num_rollouts}", "bold"),
        (f"\n{fmt.shorten(first.env, 40)} · {fmt.shorten(first.example_id, 80)}\n", "muted"),
        ("prompt ", "bold primary"),
        fmt.shorten_middle(" ".join(first.prompt[: 50 * width].split()), 2 * width - 8),
    )
    start = max(picture.group.index(picture.chosen) - MAX_COLUMNS + 1, 0)
    shown = picture.group[start : start + MAX_COLUMNS]
    num_columns = min(max(width // MIN_COLUMN, 1), len(shown))
    parts: list[RenderableType] = [head]
    for at in range(0, len(shown), num_columns):
        table = Table.grid(*[""] * num_columns, padding=(0, 2, 0, 0), expand=True)
        for column in table.columns:
            column.ratio, column.overflow = 1, "fold"
        table.add_row(*(_column(picture, sample) for sample in shown[at : at + num_columns]))
        parts += ["", table]
    if len(shown) < len(picture.group):
        parts.append(Text(f"\n{len(picture.group) - len(shown)} more are in the list", "muted"))
    return Group(*parts)


def _column(picture: GroupPicture, sample: Sample) -> Text:
    is_chosen = sample is picture.chosen
    text = Text.assemble(
        ("▌" if is_chosen else " ", "accent"),
        ("reward ", "muted"),
        (fmt.reward(sample.reward), "bold"),
        ("  adv. ", "muted"),
        (fmt.gain(sample.advantage), "bold success" if sample.advantage > 0 else "bold warning"),
        (f"  {versions(sample)} {sample.num_completion_tokens} tok\n", "muted"),
        (f" {branch_of(sample)}\n" if sample.num_branches > 1 else "", "muted"),
    )
    body = _body(picture, sample)
    if picture.words:
        body.highlight_words(picture.words, "bold reverse", case_sensitive=False)
    num_more = len(body) - MAX_CHARS
    text.append_text(body[:MAX_CHARS])
    if num_more > 0:
        text.append(f"\n… {fmt.counted(num_more, 'more character')} in the list", "muted")
    return text


def _body(picture: GroupPicture, sample: Sample) -> Text:
    line = picture.tokens.get(sample.place)
    if line is not None:
        text = Text()
        tint = make_tint(picture.tint, sample.advantage, picture.largest)
        for piece, level in tinted(line, tint):
            level_text(text, piece, level, picture.tint)
        return text
    said = [(turn.text or "(nothing)", turn.speaker == "policy" and turn.text) for turn in turns(sample)[1:]]
    return Text("\n").join(Text(words, "" if by_policy else "muted") for words, by_policy in said)


def rewards_head(step: int, rewards: Sequence[float]) -> Text:
    """The line above the histogram of a step: how many rewards there are, their mean and their range."""
    text = Text.assemble((f"step {step}", "bold"), (f" · {fmt.counted(len(rewards), 'rollout')}", "muted"))
    if rewards:
        mean, low, high = map(fmt.reward, (bounded_mean(rewards), min(rewards), max(rewards)))
        text.append(f" · mean {mean}, lowest {low}, highest {high}", "muted")
    return text


def draw_rewards(by_step: Mapping[int, Sequence[float]], chosen: int, width: int, height: int) -> Text:
    """The histogram of the chosen step, and below it a row of blocks for each step around it, newest first."""
    steps = sorted(by_step, reverse=True)
    num_bins = 20 if width < 120 else 40
    cell = max((width - _BEFORE - _AFTER) // num_bins, 1)
    bar_height = max(min(height // 3, 14), 3)
    num_rows = max(height - bar_height - 4, 1)
    place = steps.index(chosen)
    start = min(max(place - num_rows // 2, 0), max(len(steps) - num_rows, 0))
    shown = steps[start : start + num_rows]
    # One scale for all that is seen: the rows below line up with the bars above.
    low, high = reward_range(reward for step in shown for reward in by_step[step])
    counts = {step: count_bins(by_step[step], low, high, num_bins) for step in shown}
    text = Text(no_wrap=True, overflow="ellipsis")
    for row, line in enumerate(bars(counts[chosen], bar_height, cell)):
        most = f"{max(counts[chosen], default=0):>{_BEFORE - 2}}  " if row == 0 else " " * _BEFORE
        text.append(most, "muted").append(line, "primary").append("\n")
    last = fmt.reward(high)
    between = max(num_bins * cell - len(last) - (1 if cell > 1 else 0), 0)
    text.append(" " * _BEFORE + fmt.reward(low).ljust(between) + last, "muted")
    text.append(f"\n\n{'step':>{_BEFORE - 2}}  {'':{num_bins * cell}}{'mean':>7} {'rollouts':>8}", "muted")
    for step in shown:
        rewards, is_chosen = by_step[step], step == chosen
        text.append("\n▌" if is_chosen else "\n ", "accent")
        text.append(f"{step:>{_BEFORE - 3}}  ", "bold" if is_chosen else "muted")
        text.append(bars(counts[step], 1, cell)[0], "primary")
        mean = fmt.reward(bounded_mean(rewards)) if rewards else fmt.DASH
        text.append(f"{mean:>7}").append(f" {len(rewards):>8}", "muted")
    return text


def reward_range(rewards: Iterable[float]) -> tuple[float, float]:
    """From 0 to 1 where that holds all of them, else from the lowest to the highest; never empty."""
    found = list(rewards)
    low, high = min(found, default=0.0), max(found, default=1.0)
    if low >= 0.0 and high <= 1.0:
        return 0.0, 1.0
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def count_bins(rewards: Iterable[float], low: float, high: float, num_bins: int) -> list[int]:
    """The number of rewards in each of `num_bins` equal parts of `low` to `high`; `high` itself is in the last."""
    counts = [0] * num_bins
    for reward in rewards:
        # Halves, because the difference of two finite numbers may not be finite.
        share = (reward / 2 - low / 2) / (high / 2 - low / 2)
        counts[min(max(int(share * num_bins), 0), num_bins - 1)] += 1
    return counts


def bars(counts: Sequence[int], height: int, cell: int) -> list[str]:
    """`height` lines, the highest first: each count a bar `cell` wide with a gap of one where there is room for it.

    What is not 0 has at least the lowest block.
    """
    most = max(counts, default=0)
    eighths = [max(round(count / most * (8 * height)), 1) if count else 0 for count in counts]
    gap = " " if cell > 1 else ""
    lines = []
    for row in reversed(range(height)):
        parts = (_BLOCKS[min(max(each - 8 * row, 0), 8)] * (cell - len(gap)) + gap for each in eighths)
        lines.append("".join(parts))
    return lines
