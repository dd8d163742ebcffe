"""The command line of torchrun, which starts the trainer's ranks and ends them all when one of them ends.

The supervisor keeps torchrun alive as it keeps a trainer of one process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

# Ranks wait for work by asking the store again and again; torch would warn of each time that none came.
_QUIET = "TORCH_CPP_LOG_LEVEL=ERROR"
# torchrun's name for its option `--node-rank` in the environment.
NODE_VARIABLE = "PET_NODE_RANK"
# Of node 0, where ranks on several nodes meet: below the ports that the kernel gives to connections meanwhile, clear
# of those of Ray.
MEETING_PORTS = range(20_000, 30_000)


def start_ranks(num_ranks: int, module: str, arguments: Sequence[str]) -> list[str]:
    """argv that starts so many ranks of a module on this machine; see `on_nodes` for several."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return ["env", _QUIET, *torchrun, "-m", module, *arguments]


def on_nodes(argv: Sequence[str], num_nodes: int, endpoint: str, start_id: str) -> tuple[str, ...]:
    """The argv of torchrun for one machine (`--standalone`), for several that meet at `endpoint` (HOST:PORT of node 0).

    Each finds its number in NODE_VARIABLE, so rank 0 is on node 0. A command of another kind is returned as it is: it
    runs on each of the nodes.
    """
    rendezvous = ["--nnodes", str(num_nodes), "--rdzv-backend", "static", "--rdzv-endpoint", endpoint]
    rendezvous += ["--rdzv-id", start_id]
    return tuple(word for each in argv for word in (rendezvous if each == "--standalone" else (each,)))
