"""Runs the real trainer in children that are forked from one process, which has loaded torch and the model code once.

That one takes one request (JSON) a line and gives one answer a line. It is itself a fork (`tests/warm.py`). A child
costs seconds less than a new process, and can be killed. The parent makes no process group and no thread, so a fork is
safe. Children write to `log`.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.warm import ROOT, warm


class Request(dict[str, Any]):
    """What a life of the trainer is to do.

    config: TrainerConfig as JSON. until: run id to the version that ends it. evicted: run ids to wait for besides.
    done: instead of both, "module:function", which gets the workspace and returns the condition that ends the life.
    point: the name of a kill point, or null. num_ranks. max_file_bytes: no file may get larger (EFBIG), or null.
    log: a file.
    """


class Runner:
    """The parent, from outside."""

    def __init__(self) -> None:
        (asks, questions), (answers, says) = os.pipe(), os.pipe()
        self._questions, self._answers = os.fdopen(questions, "w"), os.fdopen(answers)
        parent = warm("tests.fork_runner")
        self._process = parent.fork([], os.environ, ROOT, [asks, says, 2])
        for fd in (asks, says):
            os.close(fd)

    def run(self, **request: Any) -> dict[str, Any]:
        """One life. The answer: `exits` by rank (negative: a signal) and `point`, where it was killed, or ""."""
        self._questions.write(json.dumps(request) + "\n")
        self._questions.flush()
        answer: dict[str, Any] = json.loads(self._answers.readline())
        return answer

    def close(self) -> None:
        self._questions.close()
        self._process.wait(PATIENCE_S)
        self._answers.close()


@contextmanager
def runner() -> Iterator[Runner]:
    started = Runner()
    try:
        yield started
    finally:
        started.close()


def _live(request: Request, rank: int, port: int, tell: Callable[[str], None]) -> None:
    from prime_rl.configs.trainer import TrainerConfig
    from prime_rl.contract.layout import RunDir
    from prime_rl.trainer.train import train
    from prime_rl.trainer.world import setup_world
    from tests.kill_points import BY_NAME, arm
    from tests.trainer_support import published

    num_ranks = request.get("num_ranks", 1)
    if num_ranks > 1:
        names = {"RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()})
    if request.get("point"):
        arm(BY_NAME[request["point"]], tell)
    if request.get("max_file_bytes") is not None:
        sys.dont_write_bytecode = True  # else what is imported first now is cut for good, in the environment of all
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["max_file_bytes"], resource.RLIM_INFINITY))
    config = TrainerConfig.model_validate(request["config"])
    workspace = config.output_dir

    def are_there() -> bool:
        return all(published(RunDir(workspace / run_id)) >= step for run_id, step in request["until"].items()) and all(
            RunDir(workspace / run_id).evicted.exists() for run_id in request.get("evicted", ())
        )

    done = are_there
    if "done" in request:
        module, _, name = request["done"].partition(":")
        done = getattr(importlib.import_module(module), name)(workspace)
    world = setup_world("cpu", PATIENCE_S, num_threads=1)
    train(config, world, done)
    world.close()


def _child(request: Request, rank: int, port: int, pipe: int) -> None:
    """Never returns."""
    signal.alarm(int(PATIENCE_S))  # no child lives longer, whatever it waits for
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        _live(request, rank, port, lambda name: os.write(pipe, name.encode()) and None)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run(request: Request) -> dict[str, Any]:
    port = free_port() if request.get("num_ranks", 1) > 1 else 0
    reading, writing = os.pipe()
    pids = []
    for rank in range(request.get("num_ranks", 1)):
        pid = os.fork()
        if pid == 0:
            _child(request, rank, port, writing)
        pids.append(pid)
    os.close(writing)
    exits = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    with os.fdopen(reading) as pipe:
        return {"exits": exits, "point": pipe.read()}


def main() -> None:
    import torch

    from tests import kill_points, trainer_support

    torch.set_num_threads(1)
    trainer_support.tiny_model()
    # All that a child would load otherwise, each for itself.
    for point in kill_points.BY_NAME.values():
        importlib.import_module(point.target.partition(":")[0])
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        answers.write(json.dumps(_run(Request(json.loads(line)))) + "\n")
        answers.flush()
