"""The views of the rollouts tab, with the keys that lead through them."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.contract.layout import RunDir
from tests.rollouts_support import add_batches
from tests.tui_run_support import RUN, opened_run
from tests.tui_support import add_samples, build_workspace, screen_text


@pytest.mark.slow
async def test_views_examples_steps_and_a_search(tmp_path: Path) -> None:
    workspace = build_workspace(tmp_path / "lab")
    add_batches(RunDir(workspace.path / RUN), 5)
    async with opened_run(workspace.path) as run:
        await run.tab("rollouts")
        view = run.screen.rollouts
        await run.press("v")
        await run.sees("step 5 · example 2 of 2 · 4 rollouts", "tokens by advantage")
        await run.press("n")
        await run.sees("step 5 · example 1 of 2")
        await run.press("t", "t")
        await run.sees("tokens by surprise", "120 tokens left out")
        await run.press("greater_than_sign")
        await run.press("less_than_sign", "less_than_sign")
        await run.sees("step 3 · example 2 of 2", "tokens by surprise")
        assert view.data.request.step == 3
        await run.press("p")
        await run.sees("step 4 · example 1 of 2", "tokens by surprise")

        await run.press("slash", *"env:guess step:2", "enter")
        await run.sees("step 2 · example 2 of 2", "/env:guess step:2: 1 of 4 found")
        await run.press("n")
        assert view.selected is not None and view.selected.step == 2
        await run.press("slash", *["backspace"] * 16, *"reward>1", "enter")
        await run.sees("/reward>1: not found")
        await run.press("slash", *["backspace"] * 8, *"reward>", "enter")
        await run.sees("missing value after reward>")

        await run.press("escape")
        assert "/reward>" not in screen_text(run.app)
        await run.press("v")
        await run.sees("step 2 · 64 rollouts · mean", "▌")
        await run.until(lambda: not view.data.tokens, "no tokens to be read for the histogram")
        await run.press("p")
        await run.sees("step 3 · 64 rollouts")
        await run.press("escape")
        assert view.view == "list" and run.app.screen is run.screen
        await run.press("slash", *"again", "enter", "n")
        assert view.selected is not None and "again" in view.selected.completion
        assert "*" in screen_text(run.app)
        await run.press("escape", "escape")
        await run.until(lambda: run.app.screen is not run.screen, "the home screen")


@pytest.mark.slow
async def test_a_file_without_tokens_shows_its_texts(tmp_path: Path) -> None:
    workspace = build_workspace(tmp_path / "lab")
    add_samples(RunDir(workspace.path / RUN), 3)
    async with opened_run(workspace.path) as run:
        await run.tab("rollouts")
        await run.press("v")
        await run.sees("no tokens of step 3 are kept", "step 3 · example 2 of 2 · 1 rollout", "3drow")
        await run.press("v")
        await run.sees("step 3 · 2 rollouts · mean 0.575")
