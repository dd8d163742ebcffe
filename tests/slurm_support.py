"""A real Slurm of three nodes on this host: its daemons, its configuration in a folder of its own, and free ports.

No munge and no accounting. What a node is asked to run lives on this host too, in the same process table.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from prime_rl.contract.files import wait_for
from tests.patience import PATIENCE_S

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo", "squeue")
MISSING = [program for program in PROGRAMS if shutil.which(program) is None]
WHY_SKIPPED = f"{', '.join(MISSING)} not found: apt-get install --no-install-recommends slurm-wlm"
NUM_NODES = 3
# States of nodes, as sinfo shows them, that work.
_UP = {"idle", "mix", "alloc", "comp"}
# Long timeouts: on a busy host a slurmd that answers late is no dead one.
_CONF = """\
ClusterName=t
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
MpiDefault=none
MailProg=/bin/true
SlurmctldPidFile={folder}/run/ctld.pid
SlurmctldLogFile={folder}/log/ctld.log
SlurmdPidFile={folder}/run/%n.pid
SlurmdLogFile={folder}/log/%n.log
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=1
KillWait=3
UnkillableStepTimeout=600
SlurmdTimeout=300
MessageTimeout=30
TCPTimeout=10
SlurmdParameters=config_overrides
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp
InactiveLimit=0
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=5
{nodes}
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class SlurmCluster:
    """`environment` makes srun, sbatch and the rest speak to this cluster."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    @property
    def nodes(self) -> list[str]:
        return [f"node{number + 1}" for number in range(NUM_NODES)]

    def call(self, *argv: str, check: bool = True) -> str:
        """The standard output of one of Slurm's commands."""
        done = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(argv)} exited {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def node_states(self) -> dict[str, str]:
        lines = self.call("sinfo", "-h", "-N", "-o", "%N %t", check=False).splitlines()
        return dict(line.split()[:2] for line in lines)

    def job_state(self, job: str) -> str:
        """PENDING, RUNNING, ...; "" for a job that is gone. A controller that does not answer is asked again."""
        states: list[str] = []

        def told() -> bool:
            argv = ["squeue", "-h", "-j", job, "-o", "%T"]
            done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, check=False)
            is_forgotten = "Invalid job id specified" in done.stderr
            states.extend([done.stdout.strip()] if done.returncode == 0 or is_forgotten else [])
            return bool(states)

        wait_for(told, f"the state of job {job}", timeout_s=PATIENCE_S)
        return states[0]

    def start_node(self, node: str) -> None:
        argv = ["slurmd", "-D", "-N", node, "-f", str(self.conf)]
        self.daemons[node] = _daemon(argv)

    def wait_for_nodes(self, state: str = "idle", nodes: list[str] | None = None) -> None:
        wanted = nodes or self.nodes
        wait_for(
            lambda: all(self.node_states().get(node) == state for node in wanted),
            f"{', '.join(wanted)} to be {state}",
            timeout_s=PATIENCE_S,
        )

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """What runs below a job of this cluster, by its environment; or the part of it that is on one node."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environ = process.environ()
                is_ours = environ.get("SLURM_CONF") == str(self.conf) and "SLURM_JOB_ID" in environ
                if is_ours and node in (None, environ.get("SLURMD_NODENAME")):
                    found.append(process)
        return found

    def stepds(self, node: str) -> set[psutil.Process]:
        """The slurmstepds of the steps on one node."""
        found = set()
        for process in self.processes(node):
            with contextlib.suppress(psutil.Error):
                parent = process.parent()
                if parent and parent.name() == "slurmstepd":
                    found.add(parent)
        return found

    def restore(self) -> None:
        """Bring all nodes back."""
        for node in self.nodes:
            if self.daemons[node].poll() is not None:
                self.start_node(node)
        if not self.all_up():
            self.call("scontrol", "update", f"NodeName={','.join(self.nodes)}", "State=RESUME", check=False)
        wait_for(self.all_up, "all nodes to be up", timeout_s=PATIENCE_S)

    def all_up(self) -> bool:
        """Whether Slurm says so of every node: one that does not answer says nothing."""
        states = self.node_states()
        return states.keys() == set(self.nodes) and set(states.values()) <= _UP


def _daemon(argv: list[str]) -> subprocess.Popen[bytes]:
    null = subprocess.DEVNULL
    return subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, start_new_session=True)


def free_ports(number: int) -> int:
    """The first of `number` ports in a row that nothing listens at."""
    for first in range(17001 + os.getpid() % 200 * 50, 60000, number):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + number):
                    sock = stack.enter_context(socket.socket())
                    sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports in a row")


@contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Three nodes, idle; all of it is taken down afterwards, also what its jobs left behind.

    In a folder with a short path: slurmd makes its sockets there, whose paths are 107 bytes at most.
    """
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        yield from _cluster(Path(folder))


def _cluster(folder: Path) -> Iterator[SlurmCluster]:
    for name in ("state", "log", "run", *(f"spool/node{number + 1}" for number in range(NUM_NODES))):
        (folder / name).mkdir(parents=True)
    port, host = free_ports(NUM_NODES + 1), socket.gethostname().split(".")[0]
    cluster = SlurmCluster(folder)
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port + 1 + number} CPUs=8 State=UNKNOWN"
        for number, node in enumerate(cluster.nodes)
    )
    cluster.conf.write_text(_CONF.format(port=port, user=getpass.getuser(), folder=folder, nodes=nodes))
    try:
        cluster.daemons["ctld"] = _daemon(["slurmctld", "-D", "-c", "-f", str(cluster.conf)])
        for node in cluster.nodes:
            cluster.start_node(node)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired, TimeoutError):
            cluster.call("scancel", "-u", getpass.getuser(), check=False)
            wait_for(lambda: not cluster.call("squeue", "-h", check=False).strip(), "jobs to end", timeout_s=20)
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for daemon in cluster.daemons.values():
                with contextlib.suppress(ProcessLookupError):
                    daemon.send_signal(signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                for daemon in cluster.daemons.values():
                    daemon.wait(5)
        for process in cluster.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
