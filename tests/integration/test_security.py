"""What SECURITY.md promises, against an attacker of the same account or of another that tries to break it."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import os
import pickle
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from daemons.exports import _staged
from daemons.pidfile import SupervisorLock
from prime_rl.configs.base import build, load_config
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir, list_rollout_steps
from prime_rl.contract.status import RunStatus, read_status
from prime_rl.contract.types import read_batch
from prime_rl.lora.adapter_state import load_tensors
from prime_rl.orchestrator.publication import lease
from prime_rl.utils.process import ProcessId
from tests.attacker_support import CANARY, LOOT, OTHER_UID, ROOT, ordinary
from tests.daemons_support import Prl
from tests.orchestrator_support import FakeInference, config_data, make_model, make_run, serving, until, write_toml
from tests.patience import PATIENCE_S

linux_only = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="processes are sealed on Linux only")

# Starts a process that was handed the key, lets the attacker look at it, and reports what was found.
HOLDERS = (
    LOOT
    + """
import json, subprocess, sys
from prime_rl.utils.secrets import handed_over

found = []
for code in sys.argv[1:]:
    with handed_over({**os.environ, "PRL_API_KEY": WORD}, ["PRL_API_KEY"]) as (environ, fds):
        holder = subprocess.Popen(
            [sys.executable, "-c", code], env=environ, pass_fds=fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    holder.stdout.readline()
    found.append(loot(holder.pid))
    holder.kill()
print(json.dumps(found))
"""
)
OPEN = "import os; key = open(os.environ['PRL_API_KEY_FILE']).read(); print(flush=True); input()"
AT_START = "import prime_rl.contract.layout; print(flush=True); input()"
WITH_KEY = """
import os
from prime_rl.utils.secrets import close_handed, read_secret
key = read_secret("PRL_API_KEY", os.environ)
close_handed()
assert read_secret("PRL_API_KEY", os.environ) is None and not any("memfd" in os.readlink(f"/proc/self/fd/{fd}")
    for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}"))
print(flush=True)
input()
"""


@linux_only
def test_no_process_of_the_account_reads_the_key_of_one_that_has_it() -> None:
    with ordinary(HOLDERS, OPEN, AT_START, WITH_KEY) as attacker:
        out, _ = attacker.communicate(timeout=PATIENCE_S)
    unsealed, at_start, with_key = json.loads(out)
    assert unsealed == ["open files", "memory", "stolen files", "ptrace"], "the attacker can do what it tries"
    assert at_start == [] and with_key == []


# A daemon without a record, of an ordinary account: what `prl down` of that account must find.
LOST = """
import json, os, subprocess, sys
from pathlib import Path
import psutil
from daemons.launchers.local import find_members, kill_all
from daemons.process import daemon_environment
from prime_rl.utils.process import ProcessId
from prime_rl.utils.secrets import handed_over

workspace = Path(sys.argv[1])
environ = daemon_environment(workspace, "run_a") | {"PRL_API_KEY": "k", "PYTHONPATH": sys.argv[2]}
with handed_over(environ, ["PRL_API_KEY"]) as (environ, fds):
    command = [sys.executable, "-m", "holder", "@", str(workspace / "run_a" / "control" / "orch.toml")]
    daemon = subprocess.Popen(
        command, env=environ, pass_fds=fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
daemon.stdout.readline()
try:
    psutil.Process(daemon.pid).environ()
    raise SystemExit("its environment can be read")
except psutil.AccessDenied:
    pass
process = ProcessId.of(daemon.pid)
assert process.start and process.is_running() and psutil.Process(daemon.pid).ppid() == os.getpid()
assert [each.pid for each in find_members(workspace, [], None)] == [daemon.pid]
assert find_members(workspace, [], None, but=["run_a"]) == set()
assert find_members(workspace.parent, [], None) == set(), "another workspace's"
assert kill_all(find_members(workspace, [], {"run_a"}), reap=daemon.poll) == set()
assert not process.is_running() and daemon.wait() == -9
print("good")
"""


@linux_only
def test_a_daemon_that_shows_no_environment_is_found_and_ended(tmp_path: Path) -> None:
    (tmp_path / "holder.py").write_text("import prime_rl\nprint(flush=True)\ninput()\n")
    with ordinary(LOST, str(tmp_path / "workspace"), f"{tmp_path}{os.pathsep}{ROOT}") as account:
        assert account.communicate(timeout=PATIENCE_S)[0] == "good\n"


# An environment that looks at the processes above it, and leaves processes behind that share nothing with it.
ENVIRONMENT = (
    LOOT
    + """
import json, sys
from pathlib import Path

from prime_rl.orchestrator.envs.base import Example, Outcome

HOPPER = '''
import os, time
while True:
    time.sleep(0.002)  # far quicker than anyone looks, and the other processes of the machine have a core too
    if os.fork():
        os._exit(0)
    os.setsid()
'''


def leave(*argv):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        ctypes.CDLL(None).prctl(4, 0)  # its own environment cannot be read either
        if (pid := os.fork()) == 0:
            os.setsid()
            os.execve(argv[0], argv, {})
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.wait()
    return int(os.read(reading, 99))


class Env:
    id = "somebody's"

    def __init__(self, args, seed):
        self.out = Path(args["out"])

    def examples(self, split):
        return [Example("one", [{"role": "user", "content": "?"}], "")]

    async def rollout(self, example, policy):
        await policy.complete(example.messages)
        if not self.out.exists():
            above, seen = os.getppid(), []
            seen = [way for pid in (above, int(Path(f"/proc/{above}/stat").read_text().rpartition(")")[2].split()[1]))
                    for way in loot(pid)]
            own = WORD in str(dict(os.environ)) or "PRL_API_KEY_FILE" in os.environ or WORD in _open_files(os.getpid())
            left = [leave("/bin/sleep", "600")]
            leave(sys.executable, "-c", HOPPER, str(self.out))
            partial = self.out.with_suffix(".tmp")
            partial.write_text(json.dumps({"seen": seen, "own": own, "left": left}))
            partial.rename(self.out)
        return Outcome(0.5, {})
"""
)
# In the place of a supervisor: it holds the key, and hands it to the orchestrator.
SUPERVISOR = """
import os, signal, sys
from pathlib import Path
from daemons.process import spawn
from daemons.specs import orchestrator_spec
from prime_rl.contract.layout import RunDir
from prime_rl.utils.secrets import seal

seal()
run = RunDir(Path(sys.argv[1]))
spec = orchestrator_spec(run)
daemon = spawn(spec.argv, spec.log, run.path.parent, spec.name, keys=["PRL_API_KEY"])
print(daemon.pid, flush=True)
input()
daemon.send_signal(signal.SIGTERM)
print(daemon.wait(), flush=True)
"""


def install(site: Path) -> None:
    info = site / "somebodys_env-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "somebodys_env.py").write_text(ENVIRONMENT)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-env\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[prime_rl.environments]\none = somebodys_env:Env\n")


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every account can reach and the one of `ordinary` owns."""
    folder = Path(tempfile.mkdtemp(prefix="prl-security-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@linux_only
async def test_an_environment_neither_reads_the_key_nor_outlives_its_run(public: Path) -> None:
    install(public / "site")
    model, run = make_model(public / "model"), make_run(public / "workspace")
    fake = FakeInference(model)
    fake.api_key = CANARY
    async with serving(fake) as url:
        env = {"id": "plugin:one", "args": {"out": str(run.path / "loot.json")}}
        write_toml(run, config_data(model, max_async_level=0) | {"env": [env], "client": {"base_url": url}})
        if os.getuid() == 0:
            for path in [public, *public.rglob("*")]:
                os.chown(path, OTHER_UID, OTHER_UID)
        path = f"{public / 'site'}{os.pathsep}{ROOT}"
        with ordinary(SUPERVISOR, str(run.path), env={"PYTHONPATH": path, "PRL_API_KEY": CANARY}) as supervisor:
            assert supervisor.stdin is not None and supervisor.stdout is not None
            pid = int(await asyncio.to_thread(supervisor.stdout.readline))
            await until(lambda: list_rollout_steps(run) == [1] or not psutil.pid_exists(pid), "a batch")
            assert psutil.pid_exists(pid), run.log.read_text()
            found = json.loads((run.path / "loot.json").read_text())
            below = psutil.Process(pid).children(recursive=True)
            assert found["left"][0] in [each.pid for each in below], "the orchestrator inherited it"
            supervisor.stdin.write("\n")
            supervisor.stdin.flush()
            code = await asyncio.to_thread(supervisor.stdout.readline)
    assert found["seen"] == [] and found["own"] is False
    assert int(code) == 0, run.log.read_text()
    everything = psutil.process_iter(["cmdline", "status"])
    living = [each for each in everything if each.info["status"] != psutil.STATUS_ZOMBIE]
    assert not set(below) & set(living)
    assert not [each for each in living if str(run.path / "loot.json") in (each.info["cmdline"] or [])], "the hopper"


LEAVER = """
import os, pathlib, runpy, sys
if os.fork() == 0:
    os.setsid()
    if (pid := os.fork()) == 0:
        os.setsid()
        os.execve("/bin/sleep", ["sleep", "600"], {})
    pathlib.Path(sys.argv[-1]).parent.joinpath("left").write_text(str(pid))
    os._exit(0)
os.wait()
runpy.run_module("fake_orchestrator", run_name="__main__")
"""


@linux_only
def test_what_a_killed_orchestrator_leaves_behind_is_ended_by_the_supervisor(prl: Prl) -> None:
    (prl.output_dir.parent / "modules" / "fake_leaver.py").write_text(LEAVER)
    prl.modules["orchestrator"] = "fake_leaver"
    prl.up()
    prl("runs", "add", str(prl.run_file("bad", max_steps=10_000)))
    left = prl.output_dir / "run_bad" / "control" / "left"
    wait_for(left.exists, "the orchestrator to leave a process behind", timeout_s=PATIENCE_S)
    prl.wait_state("run_bad", "active", "running", "starting", "training")
    process = ProcessId.of(int(left.read_text()))
    wait_for(lambda: not process.is_running(), "the process to be ended", timeout_s=PATIENCE_S)
    assert "no process is left" in prl("down").stdout


def locks_it(path: Path) -> bool:
    """Whether another account can take a lock on a file or folder."""
    done = subprocess.run(
        ["flock", "-n", str(path), "true"], user=OTHER_UID, group=OTHER_UID, extra_groups=[], check=False
    )
    return done.returncode == 0


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("flock"), reason="needs another account")
async def test_another_account_cannot_take_a_lock_of_the_workspace(public: Path) -> None:
    output = OutputDir(public / "workspace")
    for path in (output.supervisor_lock, output.weights_lock):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o644)
        path.chmod(0o644)
        assert locks_it(path), "as an earlier version made it"
    lock = SupervisorLock.acquire(output)
    assert lock is not None
    lock.release()
    async with lease(output.weights_lock, lambda word: None):
        pass
    with _staged(public / "export") as folder:
        (folder / "model").write_text("x")
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (output.supervisor_lock, output.weights_lock, folder)]
    assert modes == [0o600, 0o600, 0o700]
    assert not locks_it(output.supervisor_lock) and not locks_it(output.weights_lock)
    assert stat.S_IMODE((public / "export").stat().st_mode) == 0o755


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self._made = made

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._made),)


def test_a_pickle_in_the_place_of_any_file_of_a_run_runs_nothing(tmp_path: Path) -> None:
    data = pickle.dumps(Payload(tmp_path / "ran"))
    pickle.loads(data)
    (tmp_path / "ran").rmdir()  # the attack works where something is unpickled
    file = tmp_path / "file"
    readers: list[Callable[[], object]] = [
        lambda: read_batch(file),
        lambda: load_tensors(file),
        lambda: load_config(OrchestratorConfig, file),
    ]
    for content in (data, b"__import__('os').mkdir('ran')", b'{"": "!!python/object/apply:os.mkdir [ran]"}'):
        file.write_bytes(content)
        for read in readers:
            with pytest.raises(Exception):  # noqa: B017, PT011 (each has its own; what counts is what it did)
                read()
        assert read_status(file, RunStatus) is None
        assert not (tmp_path / "ran").exists()


def test_no_module_can_run_what_a_file_holds() -> None:
    """The calls that turn text or bytes into code, and models that may bring theirs, in each module of the product."""
    reward = ROOT / "prime_rl" / "orchestrator" / "envs" / "jsonl_env.py"  # of the workspace's account alone
    runs = {"eval", "exec", "__import__"} | {"pickle", "cPickle", "dill", "marshal", "shelve"}
    words = re.compile(rf"\b({'|'.join(runs)}|trust_remote_code|from_pretrained)\b")
    for path in [path for package in ("prime_rl", "daemons", "tui") for path in (ROOT / package).rglob("*.py")]:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if words.search(text) else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.Call):
                names += [node.func.id] if isinstance(node.func, ast.Name) else []
                may = [ast.unparse(each.value) for each in node.keywords if each.arg == "trust_remote_code"]
                loads = isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
                assert may == ["False"] * loads, f"{path}:{node.lineno}: or transformers asks at a terminal"
            assert not runs.intersection(names) - ({"exec"} if path == reward else set()), (
                f"{path}:{getattr(node, 'lineno', 0)}"
            )


def test_a_base_model_runs_no_code_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where transformers would ask at a terminal, and somebody said yes."""
    import torch  # with what loads models, which the other tests here do without

    from prime_rl.inference.guard import max_model_len
    from prime_rl.trainer.model import ModelError, _load_base

    model, ran = tmp_path / "model", tmp_path / "ran"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}})
    )
    (model / "evil.py").write_text(f"import os\nos.mkdir({str(ran)!r})\nclass Evil: pass\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    config = build(InferenceConfig, {"model": {"name": str(model)}}, "")
    loads: list[Callable[[], object]] = [lambda: _load_base(str(model), torch.float32), lambda: max_model_len(config)]
    for load in loads:
        with pytest.raises((ModelError, ValueError), match=r"custom code|trust_remote_code"):
            load()
    assert not ran.exists()
