"""Text from runs is shown as text: no escape sequence reaches the terminal, no markup is parsed, nothing crashes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from textual.pilot import Pilot

from prime_rl.contract.samples import Sample, SampleFile, SampleTurn
from prime_rl.contract.status import DaemonStatus
from tests.tui_support import (
    NOW,
    add_run,
    build_workspace,
    opened_app,
    orch_toml,
    screen_text,
    sees,
    write_status,
)
from tui.app import PrlApp

ATTACKS = [
    "\x1b]2;owned\x07 title",
    "\x1b[2J\x1b[31m csi",
    "\x9b31m c1",
    "\x1bP+q544e\x1b\\ dcs",
    "\x1b_apc\x1b\\ \x1b^pm\x1b\\",
    "[bold]open [/] [/bold] [/nothing] [@click=app.quit]click[/]",
    "[red",
    "[link=file:///etc/passwd]x[/link]",
    "\\[escaped] $variable {brace} %s",
    "\u202e right to left \u2066",
    "zero\u200bwidth \ufeff\u2060 joined\u200d \U000e0041 tag x\ufe0f",
    "\x00\x07\x08\x7f control",
]
# What has to be readable still: markup of a toolkit is plain text here.
KEPT = ["[bold]open [/] [/bold] [/nothing] [@click=app.quit]click[/]", "[red", "[link=file:///etc/passwd]x[/link]"]
CONTROL = (*range(0x0A), *range(0x0B, 0x20), *range(0x7F, 0xA0))
FORBIDDEN = {chr(code) for code in CONTROL} | set("\u202e\u2066\u200b\ufeff\u2060\u200d\U000e0041\ufe0f")
SEEN = "zero<U+200B>width <U+FEFF +1> joined<U+200D> <U+E0041> tag x<U+FE0F>"


opened = partial(opened_app, size=(200, 70))


async def check(app: PrlApp, pilot: Pilot[None], *seen: str) -> None:
    await sees(app, pilot, *seen)
    assert not FORBIDDEN & set(screen_text(app))


@pytest.mark.slow
async def test_hostile_text_in_every_row_of_the_home_screen(tmp_path: Path) -> None:
    workspace = build_workspace(tmp_path / "workspace")
    for number, attack in enumerate(ATTACKS):
        word: dict[str, object] = {"state": "failed", "reason": attack, "waiting_on": attack, "bottleneck": attack}
        add_run(workspace, f"run_hostile-{number}", status=word)
        (workspace.path / f"run_{attack.replace('/', '').replace(chr(0), '')[:40]}").mkdir()
        status = DaemonStatus(name=f"run_hostile-{number}", state="failed", reason=attack, log_tail=[attack])
        write_status(workspace.daemon_status(status.name), status)
    async with opened(workspace) as (app, pilot):
        await check(app, pilot, *(f"run_hostile-{number}" for number in range(len(ATTACKS))), *KEPT[1:])
        await pilot.press("slash", *"hostile", "enter")
        for _ in ATTACKS:
            await check(app, pilot, "run_hostile-")
            await pilot.press("j")
        await pilot.press("P")
        await check(app, pilot, "MEMORY", *KEPT)
        for _ in range(3):
            await pilot.press("pagedown")
            await check(app, pilot)
        await pilot.press("5")
        await check(app, pilot, "WHAT", *KEPT, SEEN)
        for _ in range(3):
            await pilot.press("pagedown")
            await check(app, pilot)


async def test_hostile_text_in_every_file_of_a_run(tmp_path: Path) -> None:
    workspace = build_workspace(tmp_path / "workspace")
    lines = "\n".join(ATTACKS)
    toml = orch_toml() + "".join(f"# {attack}\n" for attack in ATTACKS)
    run = add_run(workspace, "run_hostile", step=3, toml=toml)
    run.log.write_text("".join(f"2026-09-21T14:00:01Z ERROR {attack}\n" for attack in ATTACKS) + "after\n")
    evals = {f"eval/{attack}/reward": 0.5 for attack in (KEPT[2], ATTACKS[-1])}
    run.orchestrator_metrics.write_text(json.dumps({"step": 1, lines: 1.0, "reward/mean": 0.25, **evals}) + "\n")
    turns = [SampleTurn(number % 2 == 0, attack) for number, attack in enumerate(ATTACKS)]
    SampleFile(run.samples, keep=9).append([Sample(1, lines, lines, lines, lines, 1.0, 0.0, [0], 9, 9, turns)])
    run.evicted.write_text(lines)
    run.config_error.write_text(lines)
    with workspace.audit.open("a") as file:
        for attack in ATTACKS:
            record = {"time": NOW, "who": attack, "action": attack, "run_id": "run_hostile", "reason": attack}
            file.write(json.dumps(record) + "\n")
    async with opened(workspace) as (app, pilot):
        await pilot.press("slash", *"run_hostile", "enter", "enter")
        tabs = (
            ["reward", *KEPT[2:]],
            [*KEPT, SEEN],
            ["batch_size", *KEPT, SEEN],
            ["after", *KEPT, SEEN],
            ["no checkpoints yet"],
            [*KEPT, SEEN],
        )
        for key, seen in enumerate(tabs, start=1):
            await pilot.press(str(key))
            await check(app, pilot, *seen)
        await pilot.press("d")
        await check(app, pilot, "delete run_hostile")


@pytest.mark.slow
async def test_hostile_text_in_a_template_and_in_what_an_action_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = build_workspace(tmp_path / "workspace")
    for name in ("[bold]", "\x1b]2;owned\x07"):
        folder = tmp_path / "work" / "configs" / name
        folder.mkdir(parents=True)
        (folder / "x.toml").write_text("[[env]]\n" + "".join(f"# {attack}\n" for attack in ATTACKS))
    monkeypatch.chdir(tmp_path / "work")
    async with opened(workspace) as (app, pilot):
        await pilot.press("a")
        await check(app, pilot, "[bold]/x.toml")
        await pilot.press("enter")
        await check(app, pilot, "required, but missing", *KEPT)
        await pilot.press("escape", "e", *"[/] [red", "enter")
        await check(app, pilot, "[/] [red", ": evicted")
