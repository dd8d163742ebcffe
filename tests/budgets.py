"""How much of what has no natural end is tried: random histories, rounds of kills, phases.

`PRL_TEST_BUDGET` is `small` (the default: enough for a commit) or `full` (in all but `make test`). Each number has a
variable of its own besides, which counts more: PRL_KILL_ROUNDS, PRL_SIMULATIONS, PRL_ISOLATION_STEPS,
PRL_FUZZ_REQUESTS; PRL_KILL_SEED and PRL_ALL_PHASES choose what.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

IS_FULL = {"small": False, "full": True}[os.environ.get("PRL_TEST_BUDGET", "small")]


def _number(name: str, *, small: int, full: int) -> int:
    return int(os.environ.get(name) or (full if IS_FULL else small))


# kill -9 of random daemons of a working system; which ones is drawn from the seed.
KILL_ROUNDS = _number("PRL_KILL_ROUNDS", small=8, full=12)
KILL_SEED = int(os.environ.get("PRL_KILL_SEED", "20261121"))
# Simulated lives of groups of nodes, in each of five tests; a tenth of a second each.
SIMULATIONS = _number("PRL_SIMULATIONS", small=5, full=30)
# Updates of each run of the tests that train runs together and alone, and compare.
ISOLATION_STEPS = _number("PRL_ISOLATION_STEPS", small=6, full=12)
# Requests to a server, made from the types of its requests.
FUZZ_REQUESTS = _number("PRL_FUZZ_REQUESTS", small=48, full=2000)
# Whether a node is cut off and also killed in each of the phases of a group, and not only one of the two.
ALL_PHASES = bool(os.environ.get("PRL_ALL_PHASES"))


def examples(full: int) -> int:
    """So many of what hypothesis may draw for a test: a third of `full` in `make test`."""
    return full if IS_FULL else -(-full // 3)


def in_full(*values: Any, marks: Any = pytest.mark.slow) -> list[Any]:
    """Return parameters of a test that `make test` leaves to `make test-slow`; the others beside them guard the same.

    A tuple is one set of several parameters.
    """
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks) for value in values]


def in_release(*values: Any) -> list[Any]:
    """Return parameters of a test that only `make test-release` tries."""
    return in_full(*values, marks=pytest.mark.release)
