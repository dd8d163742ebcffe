"""The flags of one node of a group: names, values and help, the same for `prl multinode` and for the node itself.

What values are allowed together is checked by the node (`prime_rl.multinode.flags`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

EXAMPLE = "--data-path DATA --log-path LOGS --num-nodes 3 --rank-weights 2,1,1 --max-iterations 10 --master"
DEFAULT_TOML = Path("configs/multinode/demo.toml")
_ENDING = f"""\
@ FILE.toml [--a.b VALUE ...]
                      what is trained and how (default: {DEFAULT_TOML})

All nodes get the same flags but for --master, --worker, --master-addr and --gpus-per-node. Exit codes: 0 done, 1 this
node failed, 2 wrong use or refused by the group, 75 a node was lost (start the same commands again), 130 somebody
asked to stop.
"""


class FlagError(ValueError):
    """Wrong use: which flag, and what is allowed. Exit code 2."""


class NodeParser(argparse.ArgumentParser):
    """Raises FlagError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise FlagError(message)


def node_parser() -> NodeParser:
    parser = NodeParser(
        prog="prl multinode",
        usage=f"prl multinode {EXAMPLE}",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=22, width=110),
        epilog=_ENDING,
    )
    add = parser.add_argument
    add("--data-path", type=Path, metavar="DIR", help="folder with data; a model named below it is taken from there")
    add("--log-path", type=Path, metavar="DIR", help="folder that all nodes share: the output_dir")
    add("--rl-phase", default="both", metavar="MODE", help="both (default), rollout (phases 0-6) or update (7-13)")
    add("--eval-interval", type=int, metavar="N", help="evaluate the first iteration and every N-th after it")
    add("--rollout-split", metavar="WHICH", help="train-only or eval-only, with --rl-phase rollout; left out: both")
    add("--num-nodes", type=int, default=1, metavar="N", help="default 1")
    add("--rank-weights", metavar="W0,W1,..", help="share of the tasks of each node")
    add("--gpus-per-node", type=int, metavar="N", help="ranks of the trainer on this node (default: one a GPU)")
    add("--master", action="store_true", help="this node is rank 0 and leads (or RANK=0, or NODE_RANK=0)")
    add("--worker", type=int, metavar="R", help="this node is rank R (or RANK=R, or NODE_RANK=R)")
    add("--master-addr", metavar="ADDRESS", help="the master's address (default: of the interface that leads outside)")
    add("--max-iterations", type=int, metavar="I", help="end after iteration I (default: go on without end)")
    add("--elastic", action="store_true", help="go on without a lost worker; it may join again")
    add("--resume", action="store_true", help="refuse to begin anew: there must be something to go on from")
    add("--debug-mode", action="store_true", help="this node and what it starts log every detail")
    add("--dry-run", action="store_true", help="print what this command would do, phase by phase")
    return parser
