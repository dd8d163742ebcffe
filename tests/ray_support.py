"""A real Ray cluster on this host, in a process of its own (`ray_main`), and what Ray tells about it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

MARKS = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install ray"),
    pytest.mark.filterwarnings("default"),  # those of Ray's own modules
]
NODES = ("n1", "n2", "n3")


@dataclass(frozen=True)
class Cluster:
    """A head without CPUs, and a node for each name."""

    address: str
    process: subprocess.Popen[str]

    def ask(self, *words: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(*words, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "ok\n"


@contextmanager
def ray_cluster() -> Iterator[Cluster]:
    environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    os.environ.update(environ)
    command = [sys.executable, "-m", "tests.ray_main", *NODES]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            yield Cluster(process.stdout.readline().strip(), process)
        finally:
            import ray

            ray.shutdown()
            process.stdin.close()
            process.wait()


def groups() -> dict[str, dict[str, Any]]:
    """The placement groups that Ray has, by name. The caller is connected."""
    import ray

    tables = ray.util.placement_group_table().values()
    return {each["name"]: each for each in tables if each["state"] != "REMOVED"}


def nodes_of(group: str) -> list[str]:
    """The names of the nodes of a placement group's bundles, in order; [] without such a group."""
    import ray

    places = groups().get(group, {"bundles_to_node_id": {}})["bundles_to_node_id"]
    names = {each["NodeID"]: each["NodeName"] for each in ray.nodes()}
    return [names[places[number]] for number in sorted(places) if places[number] in names]
