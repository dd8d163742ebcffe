"""The results of a workspace, for a notebook or a script: its runs with their metrics, samples and configs.

    from prime_rl.results import Workspace, frame

    runs = Workspace("outputs").runs()
    frame(runs[0].metrics())

Files only, and no torch: it works with the daemons up or down, and on a copied workspace. Of a file that is being
written the whole lines are read. Text of runs is clean, and values that look like API keys are hidden. It changes
nothing, and holds no file open. What a run has reached, in one line, is `daemons.details.read_result`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from daemons.details import change_texts, metrics_lines
from daemons.errors import ActionError
from daemons.workspace import RunView
from daemons.workspace_reader import read_workspace
from prime_rl.configs.admitted import hide_secrets, read_effect
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.metrics import REWARD
from prime_rl.contract.samples import Sample, clean_sample, read_samples
from prime_rl.utils.text import clean_strings, one_line

MAX_SAMPLES = 1_000_000
FRAMES = ("pandas", "polars")


@dataclass(frozen=True)
class Run:
    """One run. `view` has what `prl runs list` shows of it: state, reason, max_steps, tags and more."""

    view: RunView
    paths: RunDir

    @property
    def run_id(self) -> str:
        """The name of its folder."""
        return self.paths.run_id

    @property
    def state(self) -> str:
        """Its state when the workspace was read: "active", "finished", ..."""
        return str(self.view.state)

    @property
    def step(self) -> int:
        """Updates done when the workspace was read."""
        return self.view.step

    @property
    def config(self) -> dict[str, Any]:
        """The config in effect, without secrets. Raises ConfigError (a ValueError) when it is missing or not TOML."""
        config: dict[str, Any] = clean_strings(hide_secrets(read_effect(self.paths).data))
        return config

    @property
    def changes(self) -> list[str]:
        """Its changes since the first step, such as "after step 86: optim.lr 0.0015 -> 0.01"; oldest first."""
        return [*change_texts(self.paths)]

    def metrics(self) -> list[dict[str, float]]:
        """One row a step, ascending: "step" and all figures of trainer and orchestrator (docs/metrics.md).

        An evaluation is in the row of the version that it evaluated. Of a step that was made again after a rollback
        the newest counts, and what came after it before that is left out. "time" is in Unix seconds.
        """
        trainer, orchestrator = _by_step(self.paths.trainer_metrics), _by_step(self.paths.orchestrator_metrics, REWARD)
        steps = sorted(trainer.keys() | orchestrator.keys())
        return [{"step": step, **trainer.get(step, {}), **orchestrator.get(step, {})} for step in steps]

    def samples(self, limit: int = MAX_SAMPLES) -> list[Sample]:
        """The newest rollouts that the run keeps as text (`[samples]`), oldest first; at most `limit`."""
        return [clean_sample(sample) for sample in read_samples(self.paths.samples, limit)]


class Workspace:
    """A workspace folder. Each call reads it again."""

    def __init__(self, path: str | Path = "outputs") -> None:
        self.path = Path(path)

    def runs(self) -> list[Run]:
        """Its runs, in the order of their names. A folder that is missing has none."""
        output = OutputDir(self.path)
        views = sorted(read_workspace(self.path).runs, key=lambda view: view.run_id)
        return [Run(view, output.run(view.run_id)) for view in views]

    def run(self, run_id: str) -> Run:
        """One of them. Raises ActionError (a RuntimeError) when there is none of that name."""
        found = [run for run in self.runs() if run.run_id == run_id]
        if not found:
            raise ActionError(f"run {run_id!r} not found in {self.path}: prl runs list shows all runs")
        return found[0]

    def metrics(self, *run_ids: str) -> list[dict[str, Any]]:
        """The metrics of these runs (default: all) in one list; each row has its "run_id" too. Raises ActionError."""
        runs = list(map(self.run, dict.fromkeys(run_ids))) if run_ids else self.runs()
        return [{"run_id": run.run_id, **row} for run in runs for row in run.metrics()]


def columns_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Every key of `rows`: "run_id", "step" and "time" first, where they are there, then the others by name."""
    names = {name for row in rows for name in row}
    first = [name for name in ("run_id", "step", "time") if name in names]
    return first + sorted(names.difference(first))


def frame(rows: Iterable[Any]) -> Any:
    """A DataFrame of rows or samples: of pandas, else of polars. Raises ImportError when neither is installed."""
    plain: list[Mapping[str, Any]] = [msgspec.to_builtins(row) for row in rows]
    for name in FRAMES:
        try:
            library = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        return library.DataFrame({name: [row.get(name) for row in plain] for name in columns_of(plain)})
    raise ImportError("a frame needs pandas or polars: pip install pandas")


def _by_step(path: Path, of_batch: str | None = None) -> dict[int, dict[str, float]]:
    """The figures of a metrics file by step. A line with the figure `of_batch` (None: each) begins its step."""
    rows: dict[int, dict[str, float]] = {}
    begun: set[int] = set()
    for step, figures in metrics_lines(path):
        if of_batch is None or of_batch in figures:
            if step in begun:  # gone back to
                rows = {each: row for each, row in rows.items() if each < step}
                begun = {each for each in begun if each < step}
            begun.add(step)
        rows[step] = {**rows.get(step, {}), **{one_line(name): value for name, value in figures.items()}}
    return rows
