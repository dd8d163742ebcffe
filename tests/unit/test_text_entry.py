"""Text from files is clean behind the readers, whichever place of whichever file it comes from.

The places are those of the schemas (`tests.text_attacks`). What widgets and tables are handed is looked at here; what
they draw is in `tests/integration/test_text_terminal.py`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemons.cli import run
from daemons.details import read_details
from daemons.workspace_reader import read_workspace
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.nodes import NodeReader
from prime_rl.contract.samples import TokenSample
from prime_rl.utils.runtime import complain, setup_logger
from tests.budgets import IS_FULL, in_full, in_release
from tests.text_attacks import (
    ALL,
    ATTACKS,
    BASE_CONFIG,
    RUN,
    SOME_ATTACKS,
    Attacked,
    check_clean,
    config_places,
    sample_line,
    statuses,
    string_places,
    texts,
    write_attacked,
    write_config,
)
from tui.model.nodes import make_group, node_problems
from tui.model.snapshot import make_snapshot
from tui.readers.machine import read_alerts
from tui.readers.rollouts import RolloutsRequest
from tui.readers.run_config import ConfigReader, ConfigRequest
from tui.readers.tabs import TABS
from tui.screens.run import RunReader, RunRequest

WORD = "wherever"
LONG = "megabyte"
IN_TURN = [
    "csi",
    *in_full("lines", "markup", "bidi"),
    *in_release(*(each for each in ATTACKS if each not in SOME_ATTACKS)),
]
# Of some attacks nothing is left to be seen, and some files may not be as long as that.
UNSEEN = ("title", "title, other end", LONG)


def looked_at(output: OutputDir) -> Iterator[str]:
    """All text of the screens that show the workspace as a whole."""
    now = time.time()
    workspace = read_workspace(output.path)
    group = make_group(NodeReader(output.path).read())
    problems, alerts = node_problems(group, now), read_alerts(output, now)
    yield from texts(make_snapshot(workspace, {}, now, group=group, group_problems=problems, alerts=alerts))


def tabs_of(output: OutputDir, run_id: str) -> Iterator[str]:
    """All text of the tabs of one run."""
    reader = RunReader(output.path, run_id)
    for tab in TABS:
        more = True
        while more:
            data, more = reader.read(RunRequest(tab, rollouts=RolloutsRequest(step=1)))
            yield from texts(data)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> OutputDir:
    """A workspace of one run that trains."""
    output = OutputDir(tmp_path_factory.mktemp("workspace"))
    write_config(output, RUN, BASE_CONFIG)
    for kind in statuses():
        write_attacked(output, kind, lambda place: None)
    return output


@pytest.mark.parametrize("attack", IN_TURN)
def test_every_string_of_every_status_file(output: OutputDir, attack: str) -> None:
    text, seen = ATTACKS[attack].replace("{}", WORD), set()
    for kind in statuses():
        for place in string_places(kind):
            name = f"{kind.__name__}{place}"
            for other in statuses():
                write_attacked(output, other, lambda each: None)
            write_attacked(output, kind, lambda each, place=place: text if each == place else None)
            found = check_clean(name, looked_at(output))
            if kind.__name__ == "RunStatus":
                found += check_clean(name, tabs_of(output, RUN))
            assert len(found) < 100_000, f"{name} is not cut: {len(found)} characters"
            if WORD in found:
                seen.add(name)
    if attack not in UNSEEN:
        expected = {"RunStatus.waiting_on", "DaemonStatus.state", "InferenceStatus.engine", "NodeStatus.host"}
        expected |= {"TrainerStatus.disk"}
        assert expected <= seen, "nothing was attacked"


@pytest.mark.parametrize("attack", IN_TURN)
def test_every_key_of_a_config(tmp_path: Path, attack: str) -> None:
    """Each with a text where a number, a list or a table is expected, too: the message quotes it."""
    output, text = OutputDir(tmp_path), ATTACKS[attack].replace("{}", WORD)
    places = list(config_places())
    for number, place in enumerate(places):
        write_config(output, f"run_{number}", place.put(BASE_CONFIG, text))
    workspace = read_workspace(output.path)
    assert len(workspace.runs) == len(places) > 100
    for view in workspace.runs:
        check_clean(str(places[int(view.run_id.removeprefix("run_"))]), texts(view))
    if attack not in UNSEEN:
        assert sum(WORD in (view.reason or "") for view in workspace.runs) > 50, "no message quotes what it found"


def test_every_key_of_a_config_in_its_tab(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    write_config(output, "run_other", BASE_CONFIG)
    for number, place in enumerate(config_places()):
        run_id = f"run_{number}"
        write_config(output, run_id, place.put(BASE_CONFIG, ALL.replace("{}", WORD)))
        reader = ConfigReader(output.path, run_id)
        found = check_clean(str(place), texts(reader.read(ConfigRequest(wants_all=True))[0]))
        found += check_clean(str(place), texts(reader.read(ConfigRequest(other="run_other"))[0]))
        assert WORD in found


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_string_of_a_rollout(output: OutputDir, attack: str) -> None:
    run = output.run(RUN)
    run.metrics.mkdir(exist_ok=True)
    text = ATTACKS[attack].replace("{}", WORD)
    for place in string_places(TokenSample):
        run.samples.write_bytes(sample_line(lambda each, place=place: text if each == place else None))
        check_clean(f"TokenSample{place}", tabs_of(output, RUN))


@pytest.mark.parametrize("attack", IN_TURN)
def test_everything_at_once(tmp_path: Path, attack: str) -> None:
    """Also other than structs: notes, logs, names of figures, of folders and of entries that are not runs."""
    attacked = Attacked(OutputDir(tmp_path), ATTACKS[attack]).build()
    seen = check_clean("home", looked_at(attacked.output))
    for run_id in (RUN, "run_evicted", "run_noted", "run_failed"):
        seen += check_clean(run_id, tabs_of(attacked.output, run_id))
        workspace = read_workspace(attacked.output.path)
        view = workspace.run(run_id)
        assert view is not None
        details = read_details(attacked.output.run(run_id), view, workspace.daemon(run_id))
        for part in (details.run, details.metrics, details.errors, details.disk, details.log_tail):
            seen += check_clean(run_id, texts(part))
    if attack in SOME_ATTACKS:
        shown = {place.partition(" ")[0] for word, place in attacked.places.items() if word in seen}
        expected = (
            "evicted.txt",
            "config_validation_error.txt",
            "log",
            "metrics",
            "audit.jsonl",
            "folder",
            "open.json",
            "said",
            "samples.jsonl.prompt",
            "samples.jsonl.tokens.pieces[]",
        )
        assert {*expected, "RunStatus.reason", "DaemonStatus.log_tail[]"} <= shown


@pytest.fixture(scope="module", params=["all", *in_full("lines", LONG)])
def attacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Attacked:
    attack = ALL if request.param == "all" else ATTACKS[request.param]
    return Attacked(OutputDir(tmp_path_factory.mktemp("attacked")), attack).build()


READING = (
    *(("status",), ("runs", "list"), ("doctor", "--quick"), ("multinode", "status")),
    *(("runs", "show", run_id) for run_id in (RUN, "run_evicted", "run_noted", "run_failed", "run_c000")),
    *(("runs", "samples", RUN), ("logs", RUN), ("logs", "trainer"), ("logs", RUN, "--grep", "after")),
    ("alerts",),
    *(("runs", "show", "run_\x1b]2;x\x07"), ("logs", "\x1b]2;x\x07"), ("--debug\x1b[31m",)),
)


@pytest.mark.parametrize("words", READING, ids=lambda words: ascii(" ".join(words)))
def test_what_prl_prints(attacked: Attacked, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    run([*words, "--output-dir", str(attacked.output.path)])
    out, err = capsys.readouterr()
    check_clean(" ".join(words), iter((out, err)))
    assert out or err


@pytest.mark.parametrize("words", [words for words in READING if "logs" not in words], ids=ascii)
def test_what_prl_prints_as_json(
    attacked: Attacked, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    run([*words, "--output-dir", str(attacked.output.path), "--json"])
    out, err = capsys.readouterr()
    check_clean(" ".join(words), iter((out, err)))
    assert out.isascii() and (not out or json.loads(out)["version"])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_what_the_shell_offers_to_complete(
    attacked: Attacked, shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of folders: nothing is offered that a terminal obeys, or that a shell takes for more than a word."""
    for folder in (attacked.output.trash, attacked.output.path):
        folder.mkdir(exist_ok=True)
        for name in (attacked.name("folder"), "$(owned)", "`owned`", "a;owned", "an owned"):
            (folder / f"run_{name}.20260101T000000Z").mkdir(exist_ok=True)
    output = f"--output-dir {attacked.output.path}"
    monkeypatch.setenv("_PRL_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    for words in ("runs show", "logs", "restart", "runs undelete"):
        line = f"prl {words} {output} "
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        run([])
        out, err = capsys.readouterr()
        offered = check_clean(f"completion of {words}", iter((out, err)))
        assert (RUN in offered) == (words != "runs undelete")
        assert "owned" not in offered


@pytest.mark.budget
def test_what_prl_says_of_a_config(attacked: Attacked, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(0, attacked.num_configs, 8 if IS_FULL else 40):
        file = str(attacked.output.run(f"run_c{number:03d}").orch_toml)
        for more in ((), ("--json",)):
            run(["runs", "validate", file, "--output-dir", str(attacked.output.path), *more])
            out, err = capsys.readouterr()
            check_clean(file, iter((out, err)))
            assert out.isascii() or not more


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_log_line_that_quotes_a_run_is_one_line_and_clean(
    attack: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    logger = setup_logger("part")
    logger.warning("%s: %s", RUN, ATTACKS[attack])
    try:
        raise RuntimeError(ATTACKS[attack])
    except RuntimeError:
        logger.exception("failed")
    complain("part", ATTACKS[attack])
    err = check_clean("a log line", iter((capsys.readouterr().err,)))
    assert err.count("\n20") == 1 + err.count("\n2026-01-01T00"), "a message makes no extra line"
