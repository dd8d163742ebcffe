"""The command line of torchrun, which starts the trainer's ranks and ends them all when one of them ends.

The supervisor keeps torchrun alive as it keeps a trainer of one process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

# Ranks wait for work by asking the store again and again; torch would warn of each time that none came.
_QUIET = "TORCH_CPP_LOG_LEVEL=ERROR"


def start_ranks(num_ranks: int, module: str, arguments: Sequence[str]) -> list[str]:
    """argv that starts so many ranks of a module on this machine; see `on_nodes` for several."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return ["env", _QUIET, *torchrun, "-m", module, *arguments]


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
