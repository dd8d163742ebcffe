"""One folder of a file server, mounted by two hosts: this one, and one with a host name and processes of its own.

The server is OpenSSH's for files, the client of both is sshfs. As on NFS, neither hears of what the other writes, each
keeps what it has seen for some seconds, and locks are its own. The other host is made of namespaces of the kernel, as a
container is, so both have one boot; this needs root and FUSE, and no NFS in the kernel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from prime_rl.contract.files import wait_for
from tests.patience import PATIENCE_S

FILE_SERVER = Path("/usr/lib/openssh/sftp-server")
PROGRAMS = ("sshfs", "fusermount3", "unshare", "nsenter")
LOGIN = "login-node"
# How long a client trusts what it has seen, in seconds; on NFS 3 to 60.
CACHED_S = 3


def why_skipped() -> str:
    """What this machine lacks for it; empty: nothing."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or not FILE_SERVER.exists():
        return f"{', '.join(missing) or FILE_SERVER} not found: apt-get install sshfs openssh-sftp-server"
    if not os.access("/dev/fuse", os.W_OK):
        return "/dev/fuse may not be opened here"
    alone = subprocess.run(["unshare", "--mount", "--uts", "--pid", "--fork", "true"], capture_output=True, check=False)
    return "" if alone.returncode == 0 else f"no namespaces here: {alone.stderr.decode(errors='replace').strip()}"


def mount_command(server: Path, served: Path, folder: Path) -> Sequence[str]:
    """sshfs with the file server in place of ssh."""
    cached = f"dcache_timeout={CACHED_S},entry_timeout={CACHED_S},attr_timeout={CACHED_S}"
    return ["sshfs", f"server:{served}", str(folder), "-o", f"ssh_command={server},{cached}"]


@contextmanager
def shared_folder(place: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """The folder as both hosts see it, and the command that enters the other host. What runs there ends with it."""
    served, folder, server = place / "served", place / "shared", place / "server"
    served.mkdir()
    folder.mkdir()
    server.write_text(f"#!/bin/sh\nexec {FILE_SERVER}\n")
    server.chmod(0o755)
    mount = mount_command(server, served, folder)
    script = f'hostname {LOGIN} && "$@" && exec sleep infinity'
    alone = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script, "sh"]
    with subprocess.Popen([*alone, *mount], stdin=subprocess.DEVNULL) as login:
        try:
            subprocess.run(mount, check=True, stdin=subprocess.DEVNULL)
            inside = psutil.Process(login.pid)
            wait_for(
                lambda: [child for child in inside.children() if child.name() == "sleep"] != [],
                "the mount of the other host",
                timeout_s=PATIENCE_S,
            )
            yield folder, ("nsenter", f"--target={inside.children()[0].pid}", "--mount", "--uts", "--pid")
        finally:
            subprocess.run(["fusermount3", "-u", "-z", str(folder)], check=False)
            login.kill()
