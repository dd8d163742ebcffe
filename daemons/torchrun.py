"""Stands in for the trainer's module where the trainer is several ranks: becomes `torchrun`, which starts them.

    PRL_MODULES=trainer=daemons.torchrun PRL_TORCHRUN="--standalone --nproc-per-node 4" prl up @ system.toml

The supervisor then keeps torchrun alive as it keeps the trainer, and ends it with all its ranks. Rank 0 must be on this
machine, because the supervisor watches its process. `PRL_TRAINER_GPUS` ("0,1,2,3") leaves the other GPUs to inference.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence

TRAINER_MODULE = "prime_rl.trainer.train"
OPTIONS_VARIABLE = "PRL_TORCHRUN"
GPUS_VARIABLE = "PRL_TRAINER_GPUS"
# Ranks wait for work by asking the store again and again; torch would warn of each time that none came.
_QUIET = "TORCH_CPP_LOG_LEVEL"
DEFAULT_OPTIONS = "--standalone --nproc-per-node gpu"


def command(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """argv of torchrun with the trainer's own arguments."""
    options = shlex.split(environ.get(OPTIONS_VARIABLE) or DEFAULT_OPTIONS)
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m", TRAINER_MODULE, *arguments]


def start_ranks(num_ranks: int, module: str, arguments: Sequence[str]) -> list[str]:
    """argv that starts so many ranks of a module on this machine; see `on_nodes` for several."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return ["env", f"{_QUIET}=ERROR", *torchrun, "-m", module, *arguments]


def on_nodes(
    argv: Sequence[str], num_nodes: int, endpoint: str, start_id: str, *, address: str = "", node: int | None = None
) -> tuple[str, ...]:
    """A torchrun's argv for one machine (with `--standalone`), for a rendezvous of several at `endpoint` (HOST:PORT).

    `address` and `node`: of the machine that the argv is for, 0 is HOST; without them torch finds out which machine is.
    A command of another kind is returned as it is: it runs on each of the nodes.
    """
    rendezvous = ["--nnodes", str(num_nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    rendezvous += ["--rdzv-id", start_id]
    if node is not None:
        rendezvous += ["--local-addr", address, "--rdzv-conf", f"is_host={node == 0:d}"]
    return tuple(word for each in argv for word in (rendezvous if each == "--standalone" else (each,)))


def num_ranks(environ: Mapping[str, str]) -> str:
    """How many ranks those options start, or "all" for one on each GPU of this machine."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--nproc-per-node", "--nproc_per_node", default="1")
    parser.add_argument("--nnodes", default="1")
    known, _ = parser.parse_known_args(shlex.split(environ.get(OPTIONS_VARIABLE) or DEFAULT_OPTIONS))
    gpus = [gpu for gpu in environ.get(GPUS_VARIABLE, "").split(",") if gpu]
    each = known.nproc_per_node if known.nproc_per_node.isdecimal() else str(len(gpus) or "all")
    nodes = known.nnodes.partition(":")[0]
    return str(int(each) * int(nodes)) if each.isdecimal() and nodes.isdecimal() else "all"


def main() -> None:
    environ = {_QUIET: "ERROR", **os.environ}
    if environ.get(GPUS_VARIABLE):
        environ["CUDA_VISIBLE_DEVICES"] = environ[GPUS_VARIABLE]
    os.execve(sys.executable, command(sys.argv[1:], environ), environ)


if __name__ == "__main__":
    main()
