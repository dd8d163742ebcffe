"""Start a daemon as it is and record what happens when: `python -m benchmarks.loop_marks DAEMON FILE ARG...`.

DAEMON is `trainer` or `orchestrator`; each line of FILE is {"what", "version", "at_s"} in the machine's
monotonic time, which is the same for all of its processes. Nothing of the daemon is changed but that it is listened to.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

from prime_rl.contract.served import parse_adapter_name


class Marks:
    """Lines of one process; a note costs microseconds."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def note(self, what: str, version: int) -> None:
        """Write one line with the moment of this call."""
        self._file.write(json.dumps({"what": what, "version": version, "at_s": time.monotonic()}) + "\n")


def listen_to_trainer(marks: Marks) -> None:
    """`updated`: an optimizer step has ended."""
    from prime_rl.trainer.step import TrainStep

    update = TrainStep.update

    def noted(*args: Any, **kwargs: Any) -> Any:
        report = update(*args, **kwargs)
        marks.note("updated", report.step)
        return report

    TrainStep.update = noted  # type: ignore[method-assign]


def listen_to_orchestrator(marks: Marks) -> None:
    """`loading` and `loaded`: the load call of a version; `asking` and `answered`: a request to it."""
    from prime_rl.orchestrator.client import Completion, CompletionRequest
    from prime_rl.orchestrator.pool import InferenceClient
    from prime_rl.orchestrator.publication import AdapterPublication

    publish, complete = AdapterPublication.publish, InferenceClient.complete

    @functools.wraps(publish)
    async def noted_publish(self: AdapterPublication, client: InferenceClient, version: int) -> None:
        marks.note("loading", version)
        await publish(self, client, version)
        marks.note("loaded", version)

    @functools.wraps(complete)
    async def noted_complete(self: InferenceClient, request: CompletionRequest) -> list[Completion]:
        version = (parse_adapter_name(request.model) or ("", 0))[1]
        marks.note("asking", version)
        answer = await complete(self, request)
        marks.note("answered", version)
        return answer

    AdapterPublication.publish = noted_publish  # type: ignore[method-assign]
    InferenceClient.complete = noted_complete  # type: ignore[method-assign]


def main(daemon: str, path: str, argv: list[str]) -> int:
    if daemon == "trainer":
        from prime_rl.trainer.train import main as run

        listen_to_trainer(Marks(Path(path)))
    else:
        from prime_rl.orchestrator.orchestrator import main as run

        listen_to_orchestrator(Marks(Path(path)))
    return run(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
