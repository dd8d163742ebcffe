"""The flags of one node of a group: names, values and help, the same for `prl multinode` and for the node itself.

The node checks which values are allowed together (`prime_rl.multinode.flags`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from prime_rl.configs import EXAMPLES

EXAMPLE = "--data-path DATA --log-path LOGS --num-nodes 3 --rank-weights 2,1,1 --max-iterations 10 --master"
DEFAULT_TOML = EXAMPLES / "multinode" / "demo.toml"
_ENDING = """\
@ FILE.toml [--a.b VALUE ...]
                      what is trained and how (default: the example multinode/demo.toml)

All nodes get the same flags, except --master, --worker, --master-addr and --gpus-per-node. Exit codes: 0 done, 1 this
node failed, 2 wrong usage or refused by the group, 75 a node was lost (start the same commands again), 130 interrupted.
"""


class FlagError(ValueError):
    """Wrong usage: the flag and its allowed values. Exit code 2."""


class FlagParser(argparse.ArgumentParser):
    """Raises FlagError where argparse would end the process."""

    def __init__(self, prog: str, example: str, ending: str) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} {example}",
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=22, width=110),
            epilog=ending,
        )

    def error(self, message: str) -> NoReturn:
        """Raise FlagError; argparse calls it for wrong usage."""
        raise FlagError(message)


def node_parser() -> FlagParser:
    """The parser of the flags; `@ FILE` and the overrides of its keys are not among them."""
    parser = FlagParser("prl multinode", EXAMPLE, _ENDING)
    add = parser.add_argument
    add("--data-path", type=Path, metavar="DIR", help="folder with data; model.name may be a folder below it")
    add("--log-path", type=Path, metavar="DIR", help="workspace that all nodes share (output_dir)")
    add("--rl-phase", default="both", metavar="MODE", help="both (default), rollout (phases 0-6) or update (7-13)")
    add("--eval-interval", type=int, metavar="N", help="evaluate the first iteration and every N-th after it")
    add("--rollout-split", metavar="WHICH", help="train-only or eval-only, with --rl-phase rollout (default: both)")
    add("--num-nodes", type=int, default=1, metavar="N", help="number of nodes (default 1)")
    add("--rank-weights", metavar="W0,W1,..", help="share of each node in the prompts of an iteration")
    add("--gpus-per-node", type=int, metavar="N", help="trainer ranks on this node (default: one for each GPU)")
    add("--master", action="store_true", help="this node is rank 0 and leads (or RANK=0, or NODE_RANK=0)")
    add("--worker", type=int, metavar="R", help="this node is rank R (or RANK=R, or NODE_RANK=R)")
    add("--master-addr", metavar="ADDRESS", help="the master's address (default: that of the outgoing interface)")
    add("--max-iterations", type=int, metavar="I", help="end after iteration I (default: never)")
    add("--elastic", action="store_true", help="continue without a lost worker; it may join again")
    add("--resume", action="store_true", help="resume an earlier start of this group; fail if there was none")
    add("--debug-mode", action="store_true", help="this node and its processes log at level debug")
    add("--dry-run", action="store_true", help="print what this command would do, by phase")
    return parser
