"""Programs as environments: what they get, each way of a reward, each fault, their limits, and that all of it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from prime_rl.configs.agents import AgentArgs, Task, read_tasks
from prime_rl.configs.base import ConfigError, build
from prime_rl.configs.envs import EnvConfig
from prime_rl.configs.jsonl import packed
from prime_rl.contract.calls import Reward
from prime_rl.contract.types import MAX_BRANCHES
from prime_rl.orchestrator.envs.agent_env import (
    FOLDER_PREFIX,
    MAX_OUTPUT_LINES,
    container_argv,
    folder_of_its_own,
)
from prime_rl.orchestrator.envs.base import Example, Outcome
from prime_rl.orchestrator.envs.checked import CheckedEnvironment, EnvironmentFault, TimedOut
from prime_rl.orchestrator.envs.process import ProcessEnvironment
from tests.agents_support import ASKS, Policy, Server, agent, once, write_rows, writes
from tests.orchestrator_support import until
from tests.patience import until_seen


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path)


# What it gets


async def test_a_program_asks_and_is_scored_by_its_file(rows: Path, tmp_path: Path) -> None:
    template = tmp_path / "template"
    (template / "lib").mkdir(parents=True)
    (template / "lib" / "helper.py").write_text("WORD = 'helper'")
    (template / "link.py").symlink_to("lib/helper.py")
    (template / "queue.py").write_text("raise SystemExit('a module of the folder')")
    program = ASKS + (
        "sys.path.insert(0, '.')\nimport link\nsys.path.pop(0)\n"
        "assert example == json.load(open('example.json'))\n"
        "seen = {'env': {n: os.environ.get(n) for n in os.environ}, 'example': example, 'word': link.WORD}\n"
        "print(json.dumps(seen), file=sys.stderr)\n"
        + writes('{"reward": 0.5, "rewards": {"form": 1}, "metrics": {"steps": 2}}')
    )
    server = Server()
    os.environ["NAMED"], os.environ["NOT_NAMED"] = "n", "x"
    try:
        variables = {"env": ["NAMED"], "set": {"MODE": "fast"}}
        outcome = await once(rows, program, Policy(server.url), cwd=str(template), **variables)
    finally:
        server.close()
        del os.environ["NAMED"], os.environ["NOT_NAMED"]
    assert (outcome.reward, outcome.rewards, outcome.metrics) == (0.5, {"form": 1.0}, {"steps": 2.0})
    ((path, key, body),) = server.seen
    message = {"role": "user", "content": "q2"}
    assert (path, key) == ("/s/run_a.Ab1/v1/chat/completions", "Bearer secret")
    assert body == {"model": "run_a", "messages": [message]}
    seen = json.loads(outcome.output)
    fields = {"prompt": "q2", "answer": "2", "hint": "h"}
    assert seen["word"] == "helper"
    assert seen["example"] == {"id": "3", "prompt": "q2", "messages": [message], "fields": fields}
    session = f"{server.url}/s/run_a.Ab1"
    wanted = {"NAMED": "n", "MODE": "fast", "NOT_NAMED": None, "PRL_SESSION_URL": session, "PRL_MODEL": "run_a"}
    wanted |= {"ANTHROPIC_BASE_URL": session, "OPENAI_API_BASE": f"{session}/v1", "ANTHROPIC_API_KEY": "secret"}
    wanted |= {"OPENAI_AGENTS_DISABLE_TRACING": "1"}
    assert {name: seen["env"].get(name) for name in wanted} == wanted


async def test_rollouts_side_by_side_have_folders_of_their_own(rows: Path, tmp_path: Path) -> None:
    """Each with a fresh copy; the right answer is not in that of a program which does not score itself."""
    (template := tmp_path / "template").mkdir()
    (template / "count").write_text("0")
    program = (
        "import json\nprint(open('count').read(), json.load(open('example.json'))['fields'].get('answer'))\n"
        "open('count', 'w').write('1')"
    )
    async with agent(rows, program, cwd=str(template), reward="contains") as env:
        examples = env.examples("train")
        assert [example.id for example in env.examples("eval")] == ["1", "2"]
        found = await asyncio.gather(*(env.rollout(each, Policy()) for each in (examples[0], examples[0])))
        assert [(each.output, each.reward) for each in found] == [("0 None", 0.0)] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda at: at.symlink_to("/etc/passwd"), "is a link to /etc/passwd, out of the folder: copy the file"),
        (lambda at: at.symlink_to("../rows.jsonl"), "is a link to ../rows.jsonl, out of the folder"),
        (lambda at: os.mkfifo(at), "must be a regular file"),
        (lambda at: at.touch() or os.truncate(at, 65 << 20), "has more than 67108864 bytes"),
    ],
)
async def test_a_folder_that_cannot_be_copied_is_refused(rows: Path, tmp_path: Path, make: Any, message: str) -> None:
    (template := tmp_path / "template").mkdir()
    make(template / "bad")
    with pytest.raises(ConfigError) as caught:
        await once(rows, "", cwd=str(template))
    assert message in str(caught.value)
    assert str(template) in str(caught.value)


async def test_what_is_not_there_is_refused_when_it_is_loaded(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for args in (
        {"command": ["no-such-program"]},
        {"runtime": "podman", "image": "i"},
        {"runtime": "docker", "image": "i"},
    ):
        config = EnvConfig.model_validate({"id": "agent", "args": {"command": ["x"], "path": str(rows), **args}})
        env = ProcessEnvironment(config, seed=1)
        try:
            with pytest.raises(
                ConfigError, match=r"'(no-such-program|podman|docker)' was not found on PATH: install it"
            ):
                await env.start()
        finally:
            await env.close()


async def test_it_runs_in_a_process_of_environments(rows: Path) -> None:
    """Where the run has no endpoint the rollout is lost with that reason."""
    config = EnvConfig.model_validate({"id": "agent", "args": {"command": [sys.executable], "path": str(rows)}})
    assert (config.timeout_s, config.max_branches, config.label) == (900.0, MAX_BRANCHES, "agent")
    env = ProcessEnvironment(config, seed=1)
    try:
        await env.start()
        example = env.examples("train")[0]
        assert (len(env.examples("train")), len(env.examples("eval")), example.id) == (10, 2, "3")
        with pytest.raises(EnvironmentFault, match="there is no endpoint for the program to ask the policy"):
            await env.rollout(example, Policy())
    finally:
        await env.close()


# Rewards


async def test_a_posted_reward_counts_and_ends_what_does_not_end(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.orchestrator.envs.agent_env.CLOSE_GRACE_S", 0.1)
    program = ASKS + (
        "post(os.environ['PRL_SESSION_URL'] + '/reward', {'reward': 0.25, 'rewards': {'form': 1}})\n"
        "import time; time.sleep(600)"
    )
    policy = Policy((server := Server()).url)
    server.posted = policy.posted
    try:
        outcome = await once(rows, program, policy, reward="posted")
    finally:
        server.close()
    assert (outcome.reward, outcome.rewards) == (0.25, {"form": 1.0})
    failed = Policy()
    failed.posted.take(Reward(0.5, error="the tool is broken"))
    with pytest.raises(EnvironmentFault, match=r"^it posted the tool is broken$"):
        await once(rows, "", failed, reward="posted")
    with pytest.raises(EnvironmentFault, match=r"^it posted no reward; its last output: bye$"):
        await once(rows, "print('bye')", reward="posted")


@pytest.mark.parametrize(
    ("reward", "printed", "expected"),
    [("exact", "thinking\n2", 1.0), ("exact", "2\nthinking", 0.0), ("number", "so it is 2.0", 1.0), ("json", "2", 1.0)],
)
async def test_scorers_take_the_last_line(rows: Path, reward: str, printed: str, expected: float) -> None:
    assert (await once(rows, f"print({printed!r})", reward=reward)).reward == expected


async def test_a_function_gets_example_transcript_and_folder(rows: Path, tmp_path: Path) -> None:
    code = tmp_path / "score.py"
    code.write_text(
        "def score(example, transcript, folder):\n"
        "    assert example['fields']['answer'] == '2' and transcript == 'said'\n"
        "    return float((folder / 'made').read_text())\n"
        "def raises(example, transcript, folder):\n"
        "    raise KeyError('x')\n"
    )
    program = "print('said'); open('made', 'w').write('0.75')"
    assert (await once(rows, program, reward=f"{code}:score")).reward == 0.75
    with pytest.raises(KeyError) as caught:
        await once(rows, program, reward=f"{code}:raises")
    assert "score.py line 5" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit(0)", 1.0),
        ("import sys; print('3 failed'); sys.exit(1)", 0.0),
        ("print('much'); print(0.4)", 0.4),
        ("import json, os; print(json.load(open(os.environ['PRL_EXAMPLE']))['fields']['answer'])", 2.0),
        ("import os; open(os.environ['PRL_VERIFIER_DIR'] + '/reward.txt', 'w').write('0.3\\n')", 0.3),
        ("import os; assert 'OPENAI_API_KEY' not in os.environ; print(len(open('made').read()))", 4.0),
    ],
)
async def test_a_command_scores_the_folder(rows: Path, code: str, expected: float) -> None:
    program = "open('made', 'w').write('done')"
    found = await once(rows, program, reward="command", reward_command=[sys.executable, "-c", code])
    assert found.reward == expected


def write_task(folder: Path, name: str, test: str) -> None:
    task = folder / name
    for path, text in {
        "instruction.md": f"do {name}",
        "task.toml": "version = '1.0'",
        "tests/test.sh": test,
        "environment/given.txt": "given",
    }.items():
        (task / path).parent.mkdir(parents=True, exist_ok=True)
        (task / path).write_text(text)


async def test_a_folder_of_tasks_is_tested(rows: Path, tmp_path: Path) -> None:
    """The tests come when the program has ended; what it put into their place counts for nothing."""
    tasks = tmp_path / "tasks"
    write_task(tasks, "one", 'test "$(cat answer)" = "do one given" && echo 0.9 > "$PRL_VERIFIER_DIR/reward.txt"')
    write_task(tasks, "two", "echo 3; exit 1")
    program = (
        "import json, os\nassert not os.path.exists('tests') and not os.path.exists('instruction.md')\n"
        "prompt = json.load(open('example.json'))['prompt']\n"
        "open('answer', 'w').write(prompt + ' ' + open('given.txt').read())\n"
        "os.mkdir('away'); os.symlink('away', 'tests'); open('away/test.sh', 'w').write('exit 0')"
    )
    async with agent(rows, program, tasks=str(tasks), num_eval_examples=0) as env:
        one, two = env.examples("train")
        assert [each.id for each in (one, two)] == ["one", "two"]
        assert (await env.rollout(one, Policy())).reward == 0.9
        assert (await env.rollout(two, Policy())).reward == 0.0
    forges = program + "\nopen('../logs/verifier/reward.txt', 'w').write('1')"
    async with agent(rows, forges, tasks=str(tasks), num_eval_examples=0) as env:
        assert (await env.rollout(env.examples("train")[1], Policy())).reward == 0.0
    (tasks / "two" / "tests" / "test.sh").unlink()
    with pytest.raises(ValueError, match=r"task 'two' has no tests/test.sh: add it, or set reward or reward_command"):
        await once(rows, program, tasks=str(tasks))
    (tasks / "two" / "instruction.md").unlink()
    with pytest.raises(ValueError, match=r"task 'two' has no instruction.md"):
        await once(rows, program, tasks=str(tasks), reward="file")


@pytest.mark.parametrize(
    ("text", "runtime", "message"),
    [
        ("environment.gpus = 1", "podman", "task 'one' asks for GPUs in its task.toml, which is not possible here"),
        ("environment.allow_internet = false", "podman", "limits the network in its task.toml"),
        ("environment.network_mode = 'no-network'", "podman", "limits the network in its task.toml"),
        ("agent.network_mode = 'allowlist'", "podman", "limits the network in its task.toml"),
        ("[[environment.mcp_servers]]\nname = 'x'", "podman", "asks for MCP servers in its task.toml"),
        ("[[steps]]\nname = 'x'", "podman", "has several steps in its task.toml"),
        ("environment.docker_image = '--privileged'", "podman", "names an image that begins with - in its task.toml"),
        ("agent.timeout_sec = 'long'", "podman", "has a task.toml that is not valid: Expected `float`, got `str`"),
        ("agent = [", "podman", "has a task.toml that is not valid"),
        ("agent.timeout_sec = 0", "podman", "has a number in its task.toml that is not above 0"),
        ("environment.memory = '" + "9" * 400 + "G'", "podman", "in its task.toml that is not above 0, or too large"),
        ("environment.cpus = inf", "podman", "in its task.toml that is not above 0, or too large"),
        ("verifier.timeout_sec = nan", "podman", "has a number in its task.toml that is not above 0"),
        (
            "environment.memory = 'much'",
            "podman",
            "environment.memory = 'much' in its task.toml: must be a size such as",
        ),
        ("environment.docker_image = 'i'", "process", "needs an image (i): set runtime = 'podman' or 'docker'"),
        ("FROM x", "process", "needs an image (environment/Dockerfile): set runtime = 'podman' or 'docker'"),
        ("FROM x", "podman", "no image: environment/Dockerfile is not built; set environment.docker_image in its"),
        ("", "podman", "has no image; set environment.docker_image in its task.toml, or image for all tasks"),
    ],
)
def test_a_task_that_cannot_be_run_as_it_asks_is_refused(tmp_path: Path, text: str, runtime: str, message: str) -> None:
    write_task(tmp_path / "tasks", "one", "exit 0")
    docker = "" if "docker_image" in text or not text.startswith(("env", "[", "agent", "ver")) else IMAGE
    name = "environment/Dockerfile" if text.startswith("FROM") else "task.toml"
    (tmp_path / "tasks" / "one" / name).write_text(docker + text)
    args = build(AgentArgs, {"command": ["x"], "tasks": "tasks", "runtime": runtime}, "args")
    with pytest.raises(ValueError, match=r"^task 'one' ") as caught:
        read_tasks(packed(tmp_path / "tasks").read_bytes(), args)
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


IMAGE = "environment.docker_image = 'of-task:1'\n"


async def test_a_task_has_its_own_image_limits_and_deadlines(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a `podman` that notes its words and runs them here. Keys that do not count are ignored."""
    podman, seen = tmp_path / "bin" / "podman", tmp_path / "seen"
    podman.parent.mkdir()
    podman.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps(sys.argv), file=open({str(seen)!r}, 'a'))\n"
        "at = next(at for at, word in enumerate(sys.argv) if word in ('of-task:1', 'mine'))\n"
        "os.chdir(next(word[:-6] for word in sys.argv if word.endswith(':/work')))\n"
        "os.environ['PRL_VERIFIER_DIR'] = '../logs/verifier'\n"
        "os.execvp(sys.argv[at + 1], sys.argv[at + 1:])\n"
    )
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{podman.parent}{os.pathsep}{os.environ['PATH']}")
    tasks = tmp_path / "tasks"
    write_task(tasks, "one", 'echo 0.5 > "$PRL_VERIFIER_DIR/reward.txt"')
    more = "cpus = 1.5\nmemory = '2G'\nstorage_mb = 1\nbuild_timeout_sec = 1\ndocker_image = 'of-task:1'"
    (tasks / "one" / "task.toml").write_text(f"version = '1.0'\nmetadata.tags = ['a']\n[environment]\n{more}")
    given = {"tasks": str(tasks), "runtime": "podman", "num_eval_examples": 0}
    assert (await once(rows, "", **given)).reward == 0.5
    for words in map(json.loads, seen.read_text().splitlines()):
        assert {"--cpus=1.5", "--memory=2048m", "of-task:1"} <= set(words)
    seen.unlink()
    assert (await once(rows, "", image="mine", memory_mb=64, **given)).reward == 0.5
    for words in map(json.loads, seen.read_text().splitlines()):
        assert {"--cpus=1.5", "--memory=64m", "mine"} <= set(words) and "of-task:1" not in words
    (tasks / "one" / "task.toml").write_text(IMAGE + "agent.timeout_sec = 3\nverifier.timeout_sec = 3")
    (tasks / "one" / "tests" / "test.sh").write_text("sleep 600")
    programs = ("import time; time.sleep(600)", "")
    own, tests = await asyncio.gather(*(once(rows, each, **given) for each in programs), return_exceptions=True)
    assert isinstance(own, TimedOut) and isinstance(tests, TimedOut)
    assert "ran longer than the timeout_sec of its task.toml = 3" in str(own) and "bash" not in str(own)
    assert "the program bash ran longer than the timeout_sec of its task.toml = 3" in str(tests)


# Faults


@pytest.mark.parametrize(
    ("program", "args", "kind", "message"),
    [
        ("print('a'); print('b'); 1/0", {}, EnvironmentFault, r"exit code 1; its last output: .*ZeroDivisionError"),
        ("", {}, EnvironmentFault, r"^it wrote no reward.json in its folder$"),
        ("import os; os.kill(os.getpid(), 9)", {}, EnvironmentFault, r"ended with exit code 137"),
        (
            "import time; print('so far', flush=True); time.sleep(600)",
            {"timeout_s": 3},
            TimedOut,
            r"timeout_s = 3; .*far",
        ),
        ("while True: pass", {"cpu_seconds": 1}, EnvironmentFault, r"exit code 152 \(cpu_seconds reached\)"),
        ("x = bytearray(1 << 30)", {"memory_mb": 256}, EnvironmentFault, r"exit code 1; .*MemoryError"),
        ("open('big', 'wb').write(bytes(2 << 20))", {"max_file_mb": 1}, EnvironmentFault, r"File too large"),
        (writes("NaN"), {}, EnvironmentFault, r"its reward.json is not valid"),
        (writes("[" * 100_000), {}, EnvironmentFault, r"its reward.json .*(not valid|bytes)"),
        (writes('{"reward": "1"}'), {}, EnvironmentFault, r"not valid .*: must be a number, or \{"),
        (writes("1e999"), {}, EnvironmentFault, r"its reward.json is not valid"),
        (writes("\udcff").replace("'w'", "'w', errors='surrogateescape'"), {}, EnvironmentFault, r"is not valid"),
        ("import os; os.symlink('/etc/hostname', 'reward.json')", {}, EnvironmentFault, r"reward.json cannot be read"),
        ("import os; os.mkfifo('reward.json')", {}, EnvironmentFault, r"reward.json cannot be read"),
        ("import os; os.mkdir('reward.json')", {}, EnvironmentFault, r"reward.json cannot be read"),
        (
            "open('reward.json', 'wb').truncate(100 << 20)",
            {},
            EnvironmentFault,
            r"has 104857600 bytes, expected at most",
        ),
    ],
)
async def test_a_fault_has_one_line(rows: Path, program: str, args: Any, kind: Any, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message) as caught:
        await once(rows, program, **args)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


async def test_a_failure_that_is_allowed_counts(rows: Path) -> None:
    assert (await once(rows, writes("1") + "; raise SystemExit(3)", allow_failure=True)).reward == 1.0


async def test_a_program_that_asks_nothing_is_a_fault(rows: Path) -> None:
    class Silent:
        id = "agent"

        def examples(self, split: str) -> list[Example]:
            return [Example("e", [], "")]

        async def rollout(self, example: Example, policy: Any) -> Outcome:
            return Outcome(1.0, output="I did\nnothing")

    config = EnvConfig.model_validate({"id": "agent", "args": {"command": ["x"], "path": str(rows)}})
    policy = Policy()
    env = CheckedEnvironment(Silent(), config, max_failure_share=1.0)
    with pytest.raises(EnvironmentFault, match=r"without asking the policy; its last output: I did \| nothing"):
        await env.rollout(Example("e", [], ""), policy)


async def test_the_newest_output_is_kept(rows: Path) -> None:
    program = "import sys\nfor n in range(300_000): print('line', n)\n" + writes("1")
    lines = (await once(rows, program)).output.splitlines()
    assert (len(lines), lines[-1]) == (MAX_OUTPUT_LINES, "line 299999")


# Ends

# Leaves its session, so that no signal to a group of processes reaches it, and is a child of nobody.
LEAVES = """
import os, subprocess, sys, time
code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code, os.environ["PID_FILE"]], start_new_session=True)
while not (os.path.exists(os.environ["PID_FILE"]) and open(os.environ["PID_FILE"]).read()): time.sleep(0.01)
"""
KILLS_ITS_KEEPER = "import signal; os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)"


def pid_in(path: Path) -> int:
    until_seen(lambda: path.exists() and path.stat().st_size > 0, "the process that leaves its session")
    return int(path.read_text(encoding="utf-8"))


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_all_that_it_started_ends_with_it(rows: Path, tmp_path: Path) -> None:
    """With a program that ends by itself, one that is too slow, and one whose rollout is cancelled."""
    path = tmp_path / "pid"
    waits = LEAVES + "time.sleep(600)"
    variables = {"PID_FILE": str(path)}
    await once(rows, LEAVES + writes("1"), set=variables)
    assert is_gone(pid_in(path))
    path.unlink()
    with pytest.raises(TimedOut):
        await once(rows, waits, set=variables, timeout_s=5)
    assert is_gone(pid_in(path))
    path.unlink()
    async with agent(rows, waits, set=variables) as env:
        task = asyncio.create_task(env.rollout(env.examples("train")[0], Policy()))
        await until(lambda: path.exists() and path.stat().st_size > 0, "the program")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_gone(pid_in(path))


# A process of an environment, as `child` is, with a stand-in for its policy.
HOST = """
import asyncio, json, sys
from prime_rl.orchestrator.envs.agent_env import AgentEnvironment
from prime_rl.utils.process import inherit_orphans
from tests.unit.test_envs_agent import Policy

async def main():
    inherit_orphans()
    rows, pid_file, program, more = sys.argv[1:]
    args = {"command": [sys.executable, "-c", program], "path": rows, "set": {"PID_FILE": pid_file}, "timeout_s": 60}
    env = AgentEnvironment(args | json.loads(more), 1)
    print(env._root, flush=True)
    for example in env.examples("train")[:2]:
        try:
            print((await env.rollout(example, Policy())).reward, flush=True)
        except Exception as error:
            print(error, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextlib.contextmanager
def host(rows: Path, pid_file: Path, program: str, **args: Any) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-c", HOST, str(rows), str(pid_file), program, json.dumps(args)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_killed_process_leaves_no_program_and_the_next_one_removes_its_folder(rows: Path, tmp_path: Path) -> None:
    with host(rows, tmp_path / "pid", LEAVES + "time.sleep(600)") as process:
        assert process.stdout is not None
        root = Path(process.stdout.readline().decode().strip())
        pid = pid_in(tmp_path / "pid")
        again, lock = folder_of_its_own()
        assert (root / "0" / "work").is_dir()  # a living process holds it
        process.kill()
        until_seen(lambda: is_gone(pid), "the program of a killed process to end")
        assert root.name.startswith(FOLDER_PREFIX)
        third, other_lock = folder_of_its_own()
        assert not root.exists() and again.exists()
        for folder, fd in ((again, lock), (third, other_lock)):
            (folder / "lock").unlink()
            folder.rmdir()
            os.close(fd)


def test_a_program_that_kills_its_keeper_leaves_nothing(rows: Path, tmp_path: Path) -> None:
    with host(rows, tmp_path / "pid", LEAVES + KILLS_ITS_KEEPER) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pid = pid_in(tmp_path / "pid")
        assert b"exit code -9" in process.stdout.readline()
        assert is_gone(pid)


# Keeps a helper in a session of its own, and another one that has ended, whose exit code is asked for later.
SCORER = """
import subprocess, sys
from pathlib import Path

started = []

def score(example, transcript, folder):
    if started:
        return float(started[0].poll() is None and started[1].wait() == 7)
    for code in ("sys.stdin.read()", "sys.exit(7)"):
        command = [sys.executable, "-c", f"import sys; {code}"]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
    while "Z (" not in Path(f"/proc/{started[1].pid}/status").read_text():
        pass
    return 0.5
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are inherited on Linux only")
def test_what_a_function_has_started_is_not_ended_with_a_rollout(rows: Path, tmp_path: Path) -> None:
    """The keepers of the programs are killed, so what these leave must be told from it."""
    code = tmp_path / "score.py"
    code.write_text(SCORER)
    more = {"reward": f"{code}:score", "allow_failure": True}
    with host(rows, tmp_path / "pid", LEAVES + KILLS_ITS_KEEPER, **more) as process:
        assert process.stdout is not None
        _, first, second = (process.stdout.readline().strip() for _ in range(3))
        assert (first, second) == (b"0.5", b"1.0")
        assert is_gone(pid_in(tmp_path / "pid"))


def test_a_container_is_a_list_of_words(tmp_path: Path) -> None:
    (tmp_path / "work" / "tests").mkdir(parents=True)
    args = {
        "command": ["a", "b c"],
        "path": "x",
        "runtime": "podman",
        "image": "img",
        "memory_mb": 64,
        "cpu_seconds": 5,
    }
    task, config = Task("", "img"), build(AgentArgs, args, "args")
    argv = container_argv(config, task, ["a", "b c"], tmp_path, "name", ["Z", "KEY"])
    assert argv == [
        *("podman", "run", "--rm", "-i", "--init", "--name", "name", "--network", "host"),
        *("-v", f"{tmp_path}/work:/work", "-v", f"{tmp_path}/logs:/logs", "-w", "/work"),
        *("-v", f"{tmp_path}/work/tests:/tests", "--memory=64m", "--ulimit=cpu=5", f"--ulimit=fsize={1 << 30}"),
        *("--env", "KEY", "--env", "Z", "img", "a", "b c"),
    ]


async def test_a_container_program_is_run(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program of that name that runs the command in the folder which it is to mount."""
    podman = tmp_path / "bin" / "podman"
    podman.parent.mkdir()
    podman.write_text(
        f"#!{sys.executable}\nimport os, sys\nat = sys.argv.index('img')\n"
        "os.chdir(next(word[:-6] for word in sys.argv if word.endswith(':/work')))\n"
        "os.execv(sys.argv[at + 1], sys.argv[at + 1:])\n"
    )
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{podman.parent}{os.pathsep}{os.environ['PATH']}")
    program = "import os; assert os.environ['OPENAI_API_KEY'] == 'secret'; " + writes("0.5")
    assert (await once(rows, program, runtime="podman", image="img")).reward == 0.5
