"""Small real daemons for tests of the daemons: processes that keep the status files of the contract and do no learning.

`fake_workspace` writes them as modules into a folder and returns a `Prl` that runs the real `prl` with them. What a
daemon should do wrong is given by files in the workspace: `crash_<daemon>` ends it at its start, `say_<daemon>` is
what it prints then, `stubborn_<daemon>` ignores SIGTERM, `stuck_trainer` gets nowhere, `saving_trainer` takes a while
to save at its end. In a workspace that `may_hang`, `hangs` names status files, a line each: the main loops of their
writers hang while it is there, also the supervisor's.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from daemons.workspace import DaemonView, RunView
from daemons.workspace_reader import WorkspaceReader, read_workspace
from prime_rl.contract.files import wait_for
from prime_rl.contract.status import Handle
from prime_rl.utils.process import ProcessId, boot_id
from tests.patience import PATIENCE_S
from tests.warm import Piped, warm

ROOT = Path(__file__).resolve().parents[1]
# Enough for a machine with ten times more to do than it can; what reaches it has failed.
RUN_TOML = """\
# kept as it is
batch_size = 8
rollouts_per_example = 4
max_steps = {max_steps}
[model]
name = "{model}"
[[env]]
id = "reverse-text"
"""

COMMON = '''
import os, signal, sys, tomllib
from pathlib import Path
from prime_rl.utils.process import StopFlag

def load(path):
    """A config that was checked before: its schema takes longer to load than all that these daemons do."""
    return tomllib.loads(Path(path).read_text())

def begin(daemon, output_dir):
    """The stop flag, after doing what the workspace asks of this daemon."""
    stop = StopFlag().install()
    if (output_dir / f"stubborn_{daemon}").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("begin", daemon, os.getpid(), flush=True)
    if (says := output_dir / f"say_{daemon}").exists():
        os.write(1, says.read_bytes())
    if (output_dir / f"crash_{daemon}").exists():
        print("fatal: told to crash \\x1b[31mred", flush=True)
        sys.exit(3)
    return stop
'''

# Python imports it first in every process. A main loop that hangs is a fault that no file can cause any more.
HANGS = """
import os, time
from pathlib import Path
from prime_rl.contract.status import StatusWriter

turn = StatusWriter.turn

def hangs():
    try:
        return (Path(os.environ.get("PRL_OUTPUT_DIR", "/nowhere")) / "hangs").read_text().split()
    except OSError:  # it is not there, or no longer
        return []

def turn_or_hang(writer):
    turn(writer)
    while "/".join(writer.path.parts[-2:]) in hangs():
        writer.status.loop_limit_s = 0.5
        time.sleep(0.05)

StatusWriter.turn = turn_or_hang
"""

TRAINER = """
import sys, time
from fake_common import *
from prime_rl.contract.layout import OutputDir, list_rollout_steps, list_steps, scan_runs
from prime_rl.contract.status import StatusWriter, TrainerRunStatus, TrainerStatus

config = load(sys.argv[2])
model, max_runs = config["model"], config["max_concurrent_runs"]
workspace = OutputDir(Path(config["output_dir"]))
stop = begin("trainer", workspace.path)
status = StatusWriter(workspace.trainer_status, TrainerStatus(
    state="waiting", model=model["name"], max_runs=max_runs, max_seq_len=config["seq_len"],
    max_rank=model["lora"]["rank"]))
slots, progress = {}, 0
while not stop():
    status.turn()
    if (workspace.path / "stuck_trainer").exists():
        stop.wait(0.05)
        continue
    progress += 1
    found = scan_runs(workspace.path)[0]
    runs = {run.run_id: run for run in found if run.orch_toml.exists() and not run.evicted.exists()}
    max_steps = {run_id: load(run.orch_toml)["max_steps"] for run_id, run in runs.items()}
    step = lambda run: max(list_steps(run.broadcast, stable_only=True), default=0)
    runs = {run_id: run for run_id, run in runs.items() if step(run) < max_steps[run_id]}
    slots = {run_id: idx for run_id, idx in slots.items() if run_id in runs}
    queue = sorted((run for run in runs if run not in slots), key=lambda run: runs[run].orch_toml.stat().st_mtime_ns)
    free = [idx for idx in range(max_runs) if idx not in slots.values()]
    slots |= dict(zip(queue, free))
    for run_id in slots:
        for done in list_rollout_steps(runs[run_id]):
            folder = runs[run_id].broadcast_dir(done)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "STABLE").touch()
    status.update(progress=progress, waiting=[run for run in queue if run not in slots], runs={
        run_id: TrainerRunStatus(run_idx=idx, step=step(runs[run_id]), max_steps=max_steps[run_id])
        for run_id, idx in slots.items()})
    stop.wait(0.05)
if (workspace.path / "saving_trainer").exists():
    time.sleep(1.0)
    (workspace.path / "saved").touch()
status.close(state="stopped", runs={}, waiting=[])
"""

INFERENCE = """
import http.server, subprocess, sys, threading
from fake_common import *
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import InferenceStatus, StatusWriter

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass

config = load(sys.argv[2])
host, port = config["host"], config["port"]
workspace = OutputDir(Path(config["output_dir"]))
stop = begin("inference", workspace.path)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(workspace.path / "worker.pid").write_text(str(worker.pid))
server = http.server.ThreadingHTTPServer((host, port), Handler)
threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
url = f"http://{host}:{server.server_port}/v1"
status = StatusWriter(workspace.inference_status, InferenceStatus(
    state="serving", base_url=url, engine=config["engine"]))
while not stop.wait(0.1):
    status.turn()
server.shutdown()
status.close(state="stopped")
# The worker is left behind on purpose: the supervisor has to find it.
"""

ORCHESTRATOR = """
import json, sys, time
from fake_common import *
from prime_rl.contract.files import append_line
from prime_rl.contract.layout import OutputDir, RunDir, list_rollout_steps
from prime_rl.contract.status import RunStatus, StatusWriter

path = Path(sys.argv[2])
run = RunDir(path.parent.parent)
stop = begin(run.run_id, run.path.parent)
max_steps = load(path)["max_steps"]
status = StatusWriter(run.status, RunStatus(run_id=run.run_id, state="running", max_steps=max_steps))
step = max(list_rollout_steps(run), default=0)
state, reason = "finished", None
while step < max_steps:
    status.turn()
    if run.evicted.exists():
        state, reason = "evicted", run.evicted.read_text()
        break
    if (run.path.parent / f"fail_{run.run_id}").exists():
        state, reason = "failed", "told to fail"
        break
    if stop.wait(0.1):
        state = "stopped"
        break
    if (run.path.parent / f"pause_{run.run_id}").exists():
        continue
    step += 1
    # Before the batch: the trainer publishes it at once, and a run that is finished has all of its lines.
    run.metrics.mkdir(exist_ok=True)
    record = {"step": step, "time": time.time(), "reward/mean": step / max_steps, "tokens_per_s": 10.0}
    append_line(run.orchestrator_metrics, json.dumps(record))
    folder = run.rollout_dir(step)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rollouts.msgpack").write_bytes(b"")
    status.update(step=step, reward=step / max_steps, tokens_per_s=10.0)
while state == "finished" and not (run.broadcast_dir(max_steps) / "STABLE").exists():
    if run.evicted.exists() or stop.wait(0.05):
        state = "stopped"
status.close(state=state, reason=reason)
sys.exit(0 if state in ("finished", "stopped") else 1)
"""


FAKE_MODULES = {kind: f"fake_{kind}" for kind in ("trainer", "inference", "orchestrator")}


@dataclass(frozen=True)
class Prl:
    """The real `prl` on one workspace, with the fake daemons."""

    output_dir: Path
    model: Path
    env: dict[str, str]
    modules: dict[str, str] = field(default_factory=lambda: dict(FAKE_MODULES))

    def start(self, *args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "daemons.cli", *args, "--output-dir", str(self.output_dir)]
        return subprocess.Popen(
            command, env=self.env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def begin(self, *args: str) -> Piped:
        """As `start`, in a process that has not to load `prl`."""
        return warm("daemons.cli").begin([*args, "--output-dir", str(self.output_dir)], env=self.env, cwd=ROOT)

    def __call__(self, *args: str, exit_code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """One command to its end, in a process that has not to load `prl`: `start` gives one that has."""
        words = [*args, "--output-dir", str(self.output_dir)]
        done = warm("daemons.cli").run(words, env=self.env, cwd=ROOT, timeout_s=PATIENCE_S)
        assert exit_code is None or done.returncode == exit_code, (args, done)
        return done

    def json(self, *args: str) -> Any:
        return json.loads(self(*args, "--json").stdout)

    def up_args(self, *more: str) -> list[str]:
        return [
            *("up", "--model.name", str(self.model), "--max_concurrent_runs", "2", "--inference.port", "0"),
            *("--supervisor.grace_s", "2", "--supervisor.backoff_s", "0.1", "--supervisor.max_backoff_s", "0.2"),
            *("--supervisor.drain_s", "5"),
            *(word for kind, module in self.modules.items() for word in (f"--deployment.modules.{kind}", module)),
            *more,
        ]

    def up(self, *more: str) -> None:
        self(*self.up_args(*more))

    def run_file(self, name: str = "reverse", max_steps: int = 3) -> Path:
        path = self.output_dir.parent / f"{name}.toml"
        path.write_text(RUN_TOML.format(max_steps=max_steps, model=self.model))
        return path

    @property
    def _hanging(self) -> Path:
        return self.output_dir.parent / "modules" / "sitecustomize.py"

    def may_hang(self) -> None:
        """Before its processes start: each of them pays for it."""
        self._hanging.write_text(HANGS)

    def hang(self, *statuses: str) -> None:
        """The main loops of the writers of these status files hang from now on, those of all others turn."""
        assert self._hanging.exists(), "may_hang() has to come before its processes"
        (self.output_dir / "hangs").write_text("\n".join(statuses))

    def members(self) -> list[psutil.Process]:
        """All living processes that carry this workspace's mark as a daemon."""
        found = []
        for process in psutil.process_iter():
            try:
                environ = process.environ()
                alive = process.status() != psutil.STATUS_ZOMBIE
            except psutil.Error:
                continue
            if alive and environ.get("PRL_OUTPUT_DIR") == str(self.output_dir.resolve()) and "PRL_DAEMON" in environ:
                found.append(process)
        return found

    def daemon(self, name: str) -> DaemonView:
        found = read_workspace(self.output_dir).daemon(name)
        assert found is not None, f"no daemon {name}"
        return found

    def is_in(self, name: str, state: str) -> bool:
        """Whether there is such a daemon, in that state."""
        found = read_workspace(self.output_dir).daemon(name)
        return found is not None and found.state == state

    def wait_state(self, name: str, *states: str, timeout_s: float = PATIENCE_S) -> RunView | DaemonView:
        """Wait until a run, or a daemon that is not an orchestrator, is in one of `states`."""
        reader = WorkspaceReader(self.output_dir)
        seen: list[RunView | DaemonView | None] = [None]

        def there() -> bool:
            workspace = reader.read()
            seen[0] = workspace.run(name) if name.startswith("run_") else workspace.daemon(name)
            return seen[0] is not None and seen[0].state in states

        wait_for(there, f"{name} to be {' or '.join(states)}", timeout_s=timeout_s)
        assert seen[0] is not None
        return seen[0]


def fake_workspace(tmp_path: Path) -> Prl:
    """A workspace in `tmp_path/out` whose daemons are the small processes of this module."""
    modules = tmp_path / "modules"
    modules.mkdir()
    for name, text in {
        "common": COMMON,
        "trainer": TRAINER,
        "inference": INFERENCE,
        "orchestrator": ORCHESTRATOR,
    }.items():
        (modules / f"fake_{name}.py").write_text(text)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    env = {key: value for key, value in os.environ.items() if key not in ("PRL_OUTPUT_DIR", "PRL_DAEMON")}
    env["PYTHONPATH"] = f"{modules}{os.pathsep}{ROOT}"
    return Prl(tmp_path / "out", model, env)


def stopped(workspace: Prl) -> Iterator[Prl]:
    """The workspace once; it is stopped afterwards, whatever happened, and what is left then fails the test."""
    workspace.output_dir.mkdir()
    yield workspace
    (workspace.output_dir / "hangs").unlink(missing_ok=True)
    workspace("down", "--timeout", "10", exit_code=None)
    left = workspace.members()
    for process in left:
        process.kill()
    assert left == []


def in_this_process(module: str, main: Callable[[Sequence[str]], int]) -> Callable[..., int | None]:
    """What `daemons.process.run_child` does with a module that loads torch, without a process that has to."""

    def run(
        argv: Sequence[str], stop: Callable[[], bool], *, stdout: IO[bytes], cwd: Path | None = None, **_: Any
    ) -> int | None:
        if stop():
            return None
        with contextlib.chdir(cwd or "."), contextlib.redirect_stdout(io.StringIO()) as said:
            code = main(argv[list(argv).index(module) + 1 :])
        stdout.write(said.getvalue().encode())
        return code

    return run


def handle_of(name: str, process: ProcessId, host: str | None = None, boot: str | None = None) -> Handle:
    """As the launcher of this machine records a start; by default one of this machine since it booted."""
    host, boot = socket.gethostname() if host is None else host, boot_id() if boot is None else boot
    return Handle(
        engine="local",
        name=name,
        start_id="0123456789ab",
        host=host,
        boot_id=boot,
        pid=process.pid,
        create_time=process.create_time,
        start=process.start,
    )


def step_clock(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """As this process sees it when the machine's clock is set: the time of the boot, and so of every start, moves."""
    boot_time = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_time + step_s)


def age_records(output_dir: Path, step_s: float) -> None:
    """What the supervisor wrote, as if the clock had been set forward since."""
    for path in (output_dir / "daemons").glob("*.*"):
        record = json.loads(path.read_bytes() or b"{}")
        for name in ("updated_at", "started_at", "create_time", "pid_create_time", "child_create_time"):
            if record.get(name) is not None:
                record[name] -= step_s
        path.write_text(json.dumps(record) if record else "")
