"""A real Ray cluster on this host: a head without CPUs, and a raylet a node.

    python -m tests.ray_main NODE...

It prints its address, then obeys `add NODE` and `remove NODE` on standard input, and answers `ok` to each. Its end ends
the cluster. A node whose raylet is killed is noticed within five seconds; one that is only slow, on a busy host, is not
taken for lost.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tests.patience import PATIENCE_S

OBJECT_STORE_BYTES = 100 * 2**20
CPUS_A_NODE = 4
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 10,
}


def main(names: list[str]) -> None:
    from ray.cluster_utils import Cluster

    def add(name: str) -> Any:
        return cluster.add_node(
            wait=False, node_name=name, num_cpus=CPUS_A_NODE, object_store_memory=OBJECT_STORE_BYTES
        )

    head = {"num_cpus": 0, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "node_name": "head", "_system_config": HEALTH})
    nodes = {name: add(name) for name in names}
    cluster.wait_for_nodes(timeout=PATIENCE_S)
    print(cluster.address, flush=True)
    try:
        for line in sys.stdin:
            act, name = line.split()
            if act == "add":
                nodes[name] = add(name)
                cluster.wait_for_nodes(timeout=PATIENCE_S)
            else:
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            print("ok", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    # Ray has its workers give way to all others (niceness 15): on a busy host they would not even start.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    main(sys.argv[1:])
