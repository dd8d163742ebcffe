"""A program for each rollout, `[[env]] id = "agent"`: started in a folder of its own, scored, and ended whole.

Imported only in the process of such an environment (`child`). The program asks the policy through the endpoint of its
rollout, `policy.endpoint`; nothing here sees what it asks. Each runs below a keeper (`utils.process`), which ends all
that the program started, whatever sessions that is in, also when this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from prime_rl.configs.agents import AGENT, TEST, AgentArgs, Task, missing_program, read_tasks
from prime_rl.configs.base import build
from prime_rl.configs.jsonl import MAX_FOLDER_BYTES, Row, packed, read_rows
from prime_rl.contract.files import UNDECODABLE, closing, open_lock, read_file
from prime_rl.orchestrator.envs.base import Example, Message, Outcome, Policy, Posted, Split
from prime_rl.orchestrator.envs.checked import EnvironmentFault, TimedOut, Transient, last_lines
from prime_rl.orchestrator.envs.jsonl_env import Scored, example_of, own_code
from prime_rl.orchestrator.envs.process import environment_of_its_own
from prime_rl.utils import process as keeper
from prime_rl.utils.text import one_line

if TYPE_CHECKING:
    from prime_rl.orchestrator.envs.child import RemotePolicy

MAX_REWARD_BYTES = 64 << 10
# Of what a program prints, the newest is kept.
MAX_OUTPUT_LINES, MAX_OUTPUT_BYTES = 200, 64 << 10
# After a reward that closes the session, and for a keeper to end its program.
CLOSE_GRACE_S, END_GRACE_S = 10.0, 10.0
LOOK_S = 1.0
FOLDER_PREFIX, LOCK = "prl-agent-", "lock"
# Exit codes whose cause is a limit.
LIMITED = {128 + signal.SIGXCPU: "cpu_seconds reached", 128 + signal.SIGXFSZ: "max_file_mb reached"}


class RewardFile(msgspec.Struct):
    """`reward.json`, unless it is a bare number."""

    reward: float
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}


@dataclass(frozen=True)
class Ended:
    """The end of a program: its exit code, 128 + N after signal N, None when it was ended; and its newest output."""

    code: int | None
    output: str

    @property
    def last_line(self) -> str:
        """The last line that is not blank; "" without one."""
        return next((line for line in reversed(self.output.splitlines()) if line.strip()), "")


class AgentEnvironment:
    """Programs that ask the policy. Raises ValueError, and OSError, for what the arguments name and cannot be used."""

    def __init__(self, args: dict[str, Any], seed: int) -> None:
        self.id = AGENT
        self._args = config = build(AgentArgs, args, "args")
        self._template = bundle(config.cwd)
        self._tasks = bundle(config.tasks)
        self._rows: dict[str, Row] = {}
        self._task_of: dict[str, Task] = {}
        if config.tasks:
            self._task_of = read_tasks(self._tasks, config)
            prompts = {name: [Message(role="user", content=task.instruction)] for name, task in self._task_of.items()}
            found = [Example(name, messages, "") for name, messages in prompts.items()]
        else:
            self._rows = {row.id: row for row in read_rows(Path(config.path), config)}
            found = [example_of(row) for row in self._rows.values()]
        train, held = config.split(found)
        self._splits: dict[Split, Sequence[Example]] = {"train": train, "eval": held}
        self._scored = Scored(config)
        if missing := missing_program(config, self._template):
            raise ValueError(f"args.{missing[0]}: {missing[1]}")
        self._root, self._lock = folder_of_its_own()
        self._numbers = itertools.count()

    def examples(self, split: Split) -> Sequence[Example]:
        """The examples of a split: rows in the order of their file, tasks in that of their names."""
        return self._splits[split]

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        """One run of the program, and its score. Raises EnvironmentFault."""
        endpoint, posted = cast("RemotePolicy", policy).endpoint, cast("RemotePolicy", policy).posted
        if endpoint is None:
            raise EnvironmentFault("there is no endpoint for the program to ask the policy")
        place, task = self._root / str(next(self._numbers)), self._task(example)
        try:
            await asyncio.to_thread(self._prepare, example, place)
            ended = await self._run(self._args.command, place, self._variables(endpoint), task, task.timeout_s, posted)
            if ended.code and not self._args.allow_failure:
                hint = f" ({LIMITED[ended.code]})" if ended.code in LIMITED else ""
                raise EnvironmentFault(f"the program ended with exit code {ended.code}{hint}{last_lines(ended.output)}")
            try:
                outcome = await self._score(example, place, ended, posted)
            except EnvironmentFault as fault:
                raise type(fault)(f"{fault}{last_lines(ended.output)}") from fault
            return replace(outcome, output=ended.output)
        except OSError as error:
            raise Transient(f"the program cannot be run: {error}") from error
        finally:
            await asyncio.to_thread(_clear, place)

    async def close(self) -> None:
        """Remove what belongs to no rollout."""
        _clear(self._root)
        os.close(self._lock)

    def _task(self, example: Example) -> Task:
        """The task of an example; of a row, one that asks for nothing of its own."""
        return self._task_of.get(example.id) or Task("", self._args.image)

    def _prepare(self, example: Example, place: Path) -> None:
        """The folder of a rollout: `work` is the program's, `example.json` beside it is for what scores."""
        folder = place / "work"
        folder.mkdir(parents=True)
        (place / "logs" / "verifier").mkdir(parents=True)
        unpack(self._template, folder)
        for part in ("environment", "files"):
            unpack(self._tasks, folder, f"{example.id}/{part}/")
        whole = self._told(example, answer=True)
        # The right answer is not for a program that does not score itself: the policy may read its files.
        told = whole if self._args.way in ("file", "posted") else self._told(example, answer=False)
        for path, each in ((place, whole), (folder, told)):
            _remove(path / "example.json")
            (path / "example.json").write_text(json.dumps(each), encoding="utf-8")

    def _told(self, example: Example, *, answer: bool) -> dict[str, Any]:
        fields = dict(self._rows[example.id].fields) if self._rows else {}
        if not answer:
            fields.pop(self._args.answer, None)
        prompt = example.messages[-1]["content"]
        return {"id": example.id, "prompt": prompt, "messages": example.messages, "fields": fields}

    @property
    def _given(self) -> dict[str, str]:
        """The variables that the arguments name, with their values."""
        return {name: os.environ[name] for name in self._args.env if name in os.environ} | self._args.set

    def _variables(self, endpoint: tuple[str, str]) -> dict[str, str]:
        """The variables of the program beside those that every process needs, by name."""
        base_url, key = endpoint
        url = base_url.removesuffix("/v1")
        own = {
            **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), base_url),
            **dict.fromkeys(("ANTHROPIC_BASE_URL", "PRL_SESSION_URL"), url),
            **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), key),
            "PRL_MODEL": url.rpartition("/")[2].rpartition(".")[0],
        }
        return {"OPENAI_AGENTS_DISABLE_TRACING": "1", "PYTHONUNBUFFERED": "1"} | self._given | own

    async def _run(
        self,
        command: Sequence[str],
        place: Path,
        variables: dict[str, str],
        task: Task,
        timeout_s: float,
        posted: Posted | None = None,
    ) -> Ended:
        """Run a command in the folder of a rollout until all of it has ended. Raises TimedOut, OSError.

        Its deadline is `timeout_s` of the task, or that of the arguments where it is shorter.
        """
        config, folder = self._args, place / "work"
        timeout_s = min(timeout_s, config.timeout_s)
        name = f"{self._root.name}-{next(self._numbers)}"
        if config.runtime == "process":
            memory, file = _bytes(config.memory_mb), _bytes(config.max_file_mb)
            limits = {"--cpu": config.cpu_seconds, "--memory": memory, "--file": file}
            argv = [word for kind, value in limits.items() if value for word in (kind, str(value))] + [*command]
        else:
            argv = container_argv(config, task, command, place, name, variables)
        # Python's own settings, and modules in the folder, are the program's and not its keeper's.
        argv = [sys.executable, "-P", "-E", keeper.__file__, *argv]
        with (place / "work" / "example.json").open("rb") as example:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=example,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=folder,
                env=environment_of_its_own(os.environ, ()) | variables,
                start_new_session=True,
            )
        output = bytearray()
        working = asyncio.ensure_future(_output(process, output))
        closed = asyncio.ensure_future((posted.closed if posted else asyncio.Event()).wait())
        try:
            async with asyncio.timeout(timeout_s):
                # Its output ends with it, unless its keeper was killed.
                while not (working.done() or closed.done()) and process.returncode is None:
                    await asyncio.wait({working, closed}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if not working.done():
                    await asyncio.wait({working}, timeout=CLOSE_GRACE_S if closed.done() else LOOK_S)
            return Ended(process.returncode, _text(output))
        except TimeoutError:
            own = "timeout_s" if timeout_s == config.timeout_s else "the timeout_sec of its task.toml"
            words = f"the program {command[0]} ran longer than {own} = {timeout_s:g}"
            raise TimedOut(f"{words}{last_lines(_text(output))}") from None
        finally:
            closed.cancel()
            await asyncio.shield(self._end(process, working, name))

    async def _end(self, process: asyncio.subprocess.Process, working: asyncio.Future[None], name: str) -> None:
        """End all of a program that has not ended, and what is left where its keeper was killed."""
        if not working.done():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await asyncio.wait({working}, timeout=END_GRACE_S)
            if process.returncode is None:
                keeper.kill_tree(process.pid)
            if self._args.runtime != "process":
                remove = [self._args.runtime, "rm", "--force", name]
                with contextlib.suppress(OSError, subprocess.SubprocessError):
                    await asyncio.to_thread(subprocess.run, remove, capture_output=True, timeout=END_GRACE_S)
        keeper.end_orphans(kept=True)  # and not what a function that scores has started
        await process.wait()
        working.cancel()

    async def _score(self, example: Example, place: Path, ended: Ended, posted: Posted) -> Outcome:
        """The score of what a program left. Raises EnvironmentFault, and what a function of the run's own raises."""
        way, folder = self._args.way, place / "work"
        if way == "file":
            return reward_file(folder / "reward.json")
        if way == "posted":
            if posted.total is None or posted.error:
                raise EnvironmentFault(f"it posted {one_line(posted.error, 300) or 'no reward'}")
            return Outcome(posted.total, rewards=posted.rewards)
        if way == "command":
            return await self._verified(example, place)
        if way == "judge":
            return Outcome(0.0)  # the orchestrator sets it
        if self._scored.scorer:
            return Outcome(float(self._scored.scorer(ended.last_line, self._rows[example.id].target)))
        return await self._scored.call(self._told(example, answer=True), ended.output, folder)

    async def _verified(self, example: Example, place: Path) -> Outcome:
        """The score that the command of the reward, or a task's tests, gives the folder."""
        folder, logs = place / "work", place / "logs" / "verifier"
        _remove(place / "logs")  # a program may have left its own verdict there
        logs.mkdir(parents=True)
        if self._tasks:
            _remove(folder / "tests")
            unpack(self._tasks, folder / "tests", f"{example.id}/tests/")
        _remove(folder / "example.json")
        shutil.copyfile(place / "example.json", folder / "example.json")
        is_process = self._args.runtime == "process"
        variables = {
            **self._given,
            "PRL_EXAMPLE": str(folder / "example.json") if is_process else "/work/example.json",
            "PRL_VERIFIER_DIR": str(logs) if is_process else "/logs/verifier",
        }
        command, task = self._args.reward_command or TEST, self._task(example)
        ended = await self._run(command, place, variables, task, task.verifier_timeout_s)
        for name in ("reward.txt", "reward.json"):
            if (logs / name).exists():
                return reward_file(logs / name)
        with contextlib.suppress(ValueError):
            if not self._args.is_tested:
                return Outcome(float(ended.last_line))
        return Outcome(float(ended.code == 0))


def container_argv(
    args: AgentArgs, task: Task, command: Sequence[str], place: Path, name: str, variables: Collection[str]
) -> list[str]:
    """The command that runs `command` in a container; the values of `variables` are not in it."""
    memory_mb = args.memory_mb or task.memory_mb
    limits = {
        "--cpus": task.cpus and f"{task.cpus:g}",
        "--memory": memory_mb and f"{memory_mb}m",
        "--ulimit=cpu": args.cpu_seconds,
        "--ulimit=fsize": _bytes(args.max_file_mb),
    }
    words = [args.runtime, "run", "--rm", "-i", "--init", "--name", name, "--network", "host"]
    words += ["-v", f"{place / 'work'}:/work", "-v", f"{place / 'logs'}:/logs", "-w", "/work"]
    if (place / "work" / "tests").is_dir():
        words += ["-v", f"{place / 'work' / 'tests'}:/tests"]
    if args.runtime == "docker":  # else what it writes would be root's
        words += ["--user", f"{os.geteuid()}:{os.getegid()}"]
    words += [f"{option}={value}" for option, value in limits.items() if value]
    words += [word for variable in sorted(variables) for word in ("--env", variable)]
    return [*words, cast(str, task.image), *command]


def reward_file(path: Path) -> Outcome:
    """The reward that a program wrote. Raises EnvironmentFault with what is wrong with it."""
    try:
        found = msgspec.json.decode(read_file(path, limit=MAX_REWARD_BYTES).strip(), type=RewardFile | float)
    except FileNotFoundError:
        raise EnvironmentFault(f"it wrote no {path.name} in its folder") from None
    except OSError as error:
        raise EnvironmentFault(f"its {path.name} cannot be read: {error}") from None
    except UNDECODABLE as error:
        words = 'must be a number, or {"reward": number, "rewards": {...}, "metrics": {...}}'
        raise EnvironmentFault(f"its {path.name} is not valid ({error}): {words}") from None
    return Outcome(found.reward, found.metrics, found.rewards) if isinstance(found, RewardFile) else Outcome(found)


def bundle(named: str | None) -> bytes:
    """The content of a folder that the arguments name, or of the packed one of a run; b"" without one."""
    if named is None:
        return b""
    path = Path(named)
    return packed(path).read_bytes() if path.is_dir() else own_code(path, 2 * MAX_FOLDER_BYTES)


def unpack(data: bytes, folder: Path, prefix: str = "") -> None:
    """Write what is below `prefix` in a packed folder to `folder`; nothing is written outside of it."""
    if not data:
        return
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        below = [member for member in tar if member.name.startswith(prefix) and member.name != prefix]
        renamed = [member.replace(name=member.name.removeprefix(prefix), deep=False) for member in below]
        tar.extractall(folder, renamed, filter="data")


def folder_of_its_own() -> tuple[Path, int]:
    """A new folder for the rollouts of this process, and what holds it. Those that nothing holds are removed."""
    for old in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError), closing(os.open(old / LOCK, os.O_RDWR | os.O_NOFOLLOW)) as fd:
            if os.fstat(fd).st_uid == os.geteuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old, ignore_errors=True)
    root = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    lock = open_lock(root / "new")
    fcntl.flock(lock, fcntl.LOCK_EX)
    (root / "new").rename(root / LOCK)  # nobody finds it without its lock
    return root, lock


async def _output(process: asyncio.subprocess.Process, output: bytearray) -> None:
    """Keep the newest output of a program until it has ended."""
    assert process.stdout is not None
    while chunk := await process.stdout.read(1 << 16):
        output += chunk
        del output[:-MAX_OUTPUT_BYTES]
    await process.wait()


def _text(output: bytearray) -> str:
    return "\n".join(output.decode(errors="replace").splitlines()[-MAX_OUTPUT_LINES:])


def _bytes(mebibytes: int | None) -> int | None:
    return mebibytes and mebibytes << 20


def _clear(folder: Path) -> None:
    """Remove a folder, also where a program has made what is in it read-only."""
    for place, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(place, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove what a program may have left in a place, whatever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
