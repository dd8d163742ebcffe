"""One side of a transfer of weights, in a process of its own that can be killed.

    python -m tests.transfer_main send PORT SEED                offers `weights(SEED)` as LABEL until it is killed
    python -m tests.transfer_main receive PORT GPU [DEVICE]     reads "LABEL" lines, writes one line of JSON for each

Both write "ready" first. GPU is the name of the GPU that the process claims to have; "-" for that of its DEVICE, which
is the CPU unless it is given.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import Tensor

from prime_rl.transfer import TransferError, WeightReceiver, WeightSender
from tests.warm import ROOT, Started, warm

HOST = "127.0.0.1"
LABEL = "run_a/broadcast/step_3"
# Of a transfer; no working machine reaches it.
TIMEOUT_S = 60.0


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"layer.{i}": torch.randn(3, 1 + i, generator=generator) for i in range(4)}
    return tensors | {
        "half": torch.randn(5, generator=generator).bfloat16(),
        "view": tensors["layer.3"].T,
        "one": torch.tensor(2.0),
    }


@dataclass(frozen=True)
class Side:
    """A process, and its standard streams."""

    process: Started
    stdin: TextIO
    stdout: TextIO

    def tell(self, label: str) -> None:
        self.stdin.write(f"{label}\n")
        self.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def ask(server: Side, label: str = LABEL) -> dict[str, Any]:
    """What a receiving `process` answers."""
    server.tell(label)
    found: dict[str, Any] = json.loads(server.stdout.readline())
    return found


def digest(tensors: dict[str, Tensor]) -> float:
    return sum(float(tensor.double().sum()) for tensor in tensors.values())


@contextlib.contextmanager
def process(*arguments: object) -> Iterator[Side]:
    """This program with `arguments`, once it is ready; killed in the end."""
    (asks, question), (answer, says) = os.pipe(), os.pipe()
    started = warm("tests.transfer_main").fork([*map(str, arguments)], os.environ, ROOT, [asks, says, 2])
    os.close(asks)
    os.close(says)
    with open(question, "w", encoding="utf-8") as stdin, open(answer, encoding="utf-8") as stdout:
        side = Side(started, stdin, stdout)
        try:
            assert stdout.readline() == "ready\n"
            yield side
        finally:
            side.kill()


def send(port: str, seed: str) -> None:
    WeightSender(HOST, int(port), timeout_s=TIMEOUT_S).offer(LABEL, weights(int(seed)))
    print("ready", flush=True)
    threading.Event().wait()


def receive(port: str, gpu: str, device: str = "cpu") -> None:
    named = None if gpu == "-" else gpu
    receiver = WeightReceiver(HOST, int(port), timeout_s=TIMEOUT_S, device=torch.device(device), gpu=named)
    print("ready", flush=True)
    for line in sys.stdin:
        found: dict[str, Any]
        try:
            tensors = receiver.receive(line.strip(), uuid.uuid4().hex)
            found = {"digest": digest(tensors), "device": str(next(iter(tensors.values())).device)}
        except TransferError as error:
            found = {"error": str(error)}
        print(json.dumps(found), flush=True)


def main(arguments: Sequence[str]) -> None:
    {"send": send, "receive": receive}[arguments[0]](*arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
