"""Any daemon of a workspace while it has nothing to do: a status file every heartbeat. Standard library only.

The supervisor starts it as trainer, inference or orchestrator, and the marks in its environment name which.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import threading
import time
from pathlib import Path

HEARTBEAT_S = 5.0


def status_of(daemon: str, workspace: Path, port: int) -> tuple[Path, dict[str, object]]:
    """The path of `daemon`'s status file, and its fields besides those of the writer."""
    if daemon == "trainer":
        runs = sorted(path.name for path in workspace.glob("run_*"))
        slots = {run_id: {"run_idx": run_idx, "max_steps": 100} for run_idx, run_id in enumerate(runs)}
        return workspace / "trainer", {"state": "waiting", "max_runs": len(runs), "runs": slots}
    if daemon == "inference":
        url = f"http://127.0.0.1:{port}/v1"
        return workspace / "inference", {"state": "serving", "base_url": url, "engine": "embedded"}
    return workspace / daemon / "control", {"state": "running", "run_id": daemon, "max_steps": 100}


def create_time() -> float:
    """Start of this process in Unix seconds, as the kernel counts it."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    boot = next(
        line for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines() if line.startswith("btime")
    )
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


class Answer(http.server.BaseHTTPRequestHandler):
    """200 to everything."""

    def do_GET(self) -> None:
        """Answer 200 without a body."""
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
        pass


def main() -> None:
    daemon, workspace = os.environ["PRL_DAEMON"], Path(os.environ["PRL_OUTPUT_DIR"])
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda signum, frame: stopped.set())
    port = 0
    if daemon == "inference":
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
    folder, words = status_of(daemon, workspace, port)
    folder.mkdir(parents=True, exist_ok=True)
    own = {"version": 1, "pid": os.getpid(), "pid_create_time": create_time(), **words}
    while True:
        last = {"state": "stopped"} if stopped.is_set() else {}
        staged = folder / ".status.json.new"
        staged.write_text(json.dumps(own | {"updated_at": time.time()} | last), encoding="utf-8")
        staged.rename(folder / "status.json")
        if last:
            return
        stopped.wait(HEARTBEAT_S)


if __name__ == "__main__":
    main()
