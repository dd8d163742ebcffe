"""`prl` on terminals and places that are not as one would wish: narrow, of another alphabet, closed, interrupted."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import typer
from rich.console import Console

from daemons import actions
from daemons.cli import run
from daemons.commands.common import watch
from daemons.commands.results import _talk
from daemons.commands.runs import runs_table
from daemons.workspace_reader import read_workspace
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import RunStatus
from prime_rl.utils.process import ProcessId
from tests.budgets import in_full
from tests.daemons_support import PATIENCE_S, ROOT, Prl, fake_workspace
from tests.warm import warm


@pytest.fixture
def prl(tmp_path: Path) -> Prl:
    made = fake_workspace(tmp_path)
    actions.add_run(made.output_dir, made.run_file(), run_id="run_a")
    return made


def test_a_narrow_terminal_shows_fewer_columns_and_whole_words(prl: Prl) -> None:
    actions.evict_run(prl.output_dir, "run_a", "because it is much too slow")
    heads = {}
    for width in (120, 60, 40, 24):
        screen = Console(file=io.StringIO(), width=width)
        screen.print(runs_table(read_workspace(prl.output_dir).runs, now=time.time()))
        text = screen.file.getvalue()  # type: ignore[attr-defined]
        assert "run_a" in text and "evicted" in text and "…" not in text and max(map(len, text.splitlines())) <= width
        heads[width] = text.splitlines()[0].split()
    assert heads[120] == ["run", "state", "slot", "step", "reward", "tokens/s", "lag", "age", "why"]
    assert len(heads[60]) > len(heads[40]) > len(heads[24]) and heads[24] == ["run", "state", "step"]


@pytest.mark.parametrize("coding", ["ascii", *in_full("latin-1")])
def test_what_a_terminal_cannot_show_is_a_question_mark(prl: Prl, coding: str) -> None:
    prl.env["PYTHONIOENCODING"] = coding
    command = [sys.executable, "-m", "daemons.cli", "--debug", "runs", "list", "--output-dir", str(prl.output_dir)]
    actions.evict_run(prl.output_dir, "run_a", "zu früh 木")
    done = subprocess.run(command, capture_output=True, env=prl.env, check=True)
    assert ("zu fr?h ?" if coding == "ascii" else "zu früh ?") in done.stdout.decode(coding)


def test_what_python_cannot_read_from_the_terminal_is_read_as_utf_8(prl: Prl) -> None:
    actions.evict_run(
        prl.output_dir, "run_a", os.fsdecode("zu früh".encode()).encode().decode("ascii", "surrogateescape")
    )
    view = read_workspace(prl.output_dir).run("run_a")
    assert view is not None and view.reason == "zu früh"


@pytest.mark.parametrize("words", [("status",), ("down",)])
def test_a_workspace_that_is_not_there_is_wrong_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert run([*words, "--output-dir", str(tmp_path / "none")]) == 2
    line = f"prl: no workspace at {tmp_path / 'none'}: start one with prl up, or name another\n"
    assert capsys.readouterr() == ("", line) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["daemons.monitors", "benchmarks.supervisor_scale"])
def test_help_leaves_nothing_and_is_no_traceback(tmp_path: Path, module: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("status",), ("runs", "list"), ("runs", "show", "run_a"), ("status", "--json")])
def test_a_workspace_that_cannot_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    assert run([*words, "--output-dir", str(tmp_path / "file")]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        f"prl: cannot read workspace {tmp_path / 'file'}: Not a directory; choose another with --output-dir\n",
    )


def test_an_unexpected_error_is_one_line_and_a_traceback_with_debug(
    prl: Prl, capsys: pytest.CaptureFixture[str]
) -> None:
    log = OutputDir(prl.output_dir).run("run_a").log
    log.parent.mkdir()
    log.touch()
    words = ["logs", "run_a", "-n", str(10**30), "--output-dir", str(prl.output_dir)]
    assert run(words) == 1
    err = capsys.readouterr().err
    assert err.startswith("prl: unexpected ValueError: ") and err.endswith("run prl --debug ... for the traceback\n")
    assert err.count("\n") == 1
    with pytest.raises(ValueError, match="maxsize"):
        run(["--debug", *words])


def test_ctrl_c_while_a_delete_waits_says_how_things_stand(prl: Prl) -> None:
    holder = OutputDir(prl.output_dir).run("run_a")
    status = RunStatus(run_id="run_a", state="running")
    status.sign(ProcessId.of(os.getpid()))
    holder.status.write_bytes(msgspec.json.encode(status))
    child = prl.begin("runs", "delete", "run_a", "--yes")
    assert "waiting for its orchestrator" in child.stdout.readline()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, err.count("\n")) == (130, 1) and "stays evicted" in err


@pytest.mark.parametrize("absent", [None, "standard error must be a terminal"])
def test_a_demo_opens_the_console_only_where_all_of_it_is_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str | None
) -> None:
    """As text otherwise; what counts as a terminal is tested with prl-tui."""
    seen: list[bool] = []

    def run_demo(*args: object, with_tui: bool, stays: bool) -> None:
        seen.append(with_tui)

    monkeypatch.setattr("daemons.demo.no_terminal", lambda: absent)
    monkeypatch.setattr("daemons.demo.run_demo", run_demo)
    assert run(["demo", "--output-dir", str(tmp_path / "demo")]) == 130
    assert run(["demo", "--plain", "--output-dir", str(tmp_path / "demo")]) == 130
    assert seen == [absent is None, False]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_watch_that_is_interrupted_as_it_prints_shows_no_half_of_a_table(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            """The second table's head, Ctrl-C, and the rest."""
            head, found, rest = text.partition("head")
            written = super().write(head + found)
            if found and self.getvalue().count("head") == 2:
                signal.raise_signal(signal.SIGINT)
            return written + super().write(rest)

    screen = Console(file=Screen(), force_terminal=is_terminal, width=80, height=24)
    monkeypatch.setattr("daemons.commands.common.console", lambda: screen)
    monkeypatch.setattr("daemons.commands.common.WATCH_EVERY_S", 0.01)
    before = signal.getsignal(signal.SIGINT)
    try:
        watch(lambda: "head\nrow\nlast")
    finally:
        signal.signal(signal.SIGINT, before)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert (
        shown.count("head") == shown.count("last") == 2 + is_terminal
    )  # where it can be, the last replaces the others


@pytest.mark.parametrize(("end", "code"), [(KeyboardInterrupt, 130), (EOFError, 0)])
def test_a_chat_that_is_ended_at_its_prompt_leaves_a_line_of_its_own_to_the_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: type[BaseException], code: int
) -> None:
    def ask(prompt: str) -> str:
        print(prompt, end="")
        raise end

    monkeypatch.setattr("builtins.input", ask)
    with pytest.raises(typer.Exit) as ended:
        _talk(cast(Any, SimpleNamespace(label="base")))
    assert (ended.value.exit_code, capsys.readouterr().out.splitlines()[-1]) == (code, "> ")


def test_the_head_of_a_list_is_enough(prl: Prl) -> None:
    command = f"{sys.executable} -m daemons.cli runs list --watch --output-dir {prl.output_dir} | head -n 1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=prl.env, timeout=PATIENCE_S, check=False
    )
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


@pytest.mark.slow
def test_down_ends_a_start_that_builds_the_base_model(tmp_path: Path) -> None:
    """From another terminal, which sees it under way; nothing is left of it."""
    where, prl = ["--output-dir", str(tmp_path / "out")], warm("daemons.cli")
    (tmp_path / "out").mkdir()

    def told(*words: str) -> str:
        return prl.run([*words, *where], env=os.environ, cwd=ROOT, timeout_s=PATIENCE_S).stdout

    up = prl.start(["up", *where], env=os.environ, cwd=tmp_path, log=tmp_path / "log")
    try:
        wait_for(lambda: "prl up is preparing" in told("status"), "the start to be under way", timeout_s=PATIENCE_S)
        assert "stopped, no process is left" in told("down")
        assert up.wait(PATIENCE_S) == 130
    finally:
        up.kill()
    assert told("status").startswith("nothing is running") and not (tmp_path / "models" / "base").exists()


@pytest.mark.parametrize(
    ("entry", "module"),
    [("from daemons.start import main; main()", "typer"), ("from tui.cli import main; main(['.'])", "textual")],
)
def test_ctrl_c_while_it_is_being_loaded_is_quiet(tmp_path: Path, entry: str, module: str) -> None:
    (tmp_path / f"{module}.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(600)\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TEXTUAL_DRIVER": "web"}
    with subprocess.Popen(
        [sys.executable, "-c", entry], env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "loading\n"
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, err) == (130, "")
