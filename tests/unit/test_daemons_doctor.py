"""The doctor's verdict on each fact, and that it looks at all of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from daemons import doctor
from daemons.doctor import HOME, examine, packages_found, probe
from daemons.machine import DiskView
from prime_rl.contract.layout import OutputDir
from tests.budgets import in_full
from tests.unit.test_contract_disk import Look, look  # noqa: F401

ROOT = Path(__file__).parents[2]
MOUNTS = """\
21 1 8:1 / / rw - ext4 /dev/sda1 rw
22 21 0:40 / /srv/nfs rw - nfs4 server:/x rw
23 21 0:41 / /run/mem rw - tmpfs tmpfs rw
"""


def test_python_and_packages() -> None:
    assert doctor.check_python((3, 10, 4), "/p").level == "broken"
    assert doctor.check_python(sys.version_info[:3], "/p").level == "ok"
    assert doctor.check_package("torch", None, needed=True).level == "broken"
    assert doctor.check_package("vllm", None, needed=False).level == "ok"
    assert doctor.check_package("vllm", None, needed=True).advice
    damaged = doctor.check_package("torch", "2.9", needed=True, error="libfoo.so: not found")
    assert (damaged.level, "libfoo.so" in damaged.message) == ("broken", True)
    assert doctor.check_package("vllm", "0.32", needed=False, error="x").level == "warning"


def test_a_gpu_that_torch_does_not_see_is_a_warning() -> None:
    levels = [
        doctor.check_gpu(d, driver_sees_some=s, threads=2).level for d, s in (([], True), ([], False), (["H"], True))
    ]
    assert levels == ["warning", "ok", "ok"]


@pytest.mark.parametrize(
    ("place", "level", "word"),
    [("/srv/nfs/a", "warning", "nfs4"), ("/run/mem", "warning", "reboot"), ("/a", "ok", "ext4")],
)
def test_what_the_file_system_means(tmp_path: Path, place: str, level: str, word: str) -> None:
    mounts = tmp_path / "mountinfo"
    root = tmp_path / "root"
    (root / place[1:]).mkdir(parents=True)
    mounts.write_text(MOUNTS.replace(" / /srv", f" / {root}/srv").replace(" / /run", f" / {root}/run"))
    check = doctor.check_file_system(root / place[1:], mounts)
    assert (check.level, word in check.message) == (level, True), check


@pytest.mark.parametrize(("free_gb", "level"), [(0.1, "broken"), (2, "warning"), (50, "ok")])
def test_free_disk(free_gb: float, level: str) -> None:
    view = DiskView(int(free_gb * 1e9), 100 * 10**9, 0, True, "ext4", None)
    assert doctor.check_disk(view).level == level


def test_inotify_limits_are_compared_with_the_runs() -> None:
    limits = {"max_user_instances": 128, "max_user_watches": 8192}
    assert doctor.check_inotify(100, limits).level == "ok"
    short = doctor.check_inotify(200, limits)
    assert short.level == "warning" and short.advice == "sysctl -w fs.inotify.max_user_instances=416"
    assert doctor.check_inotify(10**6, {}).level == "ok", "a system without them"


def test_a_taken_port_is_broken_unless_this_workspace_has_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert doctor.check_port("127.0.0.1", port, served_by_workspace=False).level == "broken"
        assert doctor.check_port("127.0.0.1", port, served_by_workspace=True).level == "ok"
    assert doctor.check_port("127.0.0.1", 0, served_by_workspace=False).level == "ok"


def test_a_busy_port_that_nothing_has_chosen_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        busy = partial(doctor.check_port, "127.0.0.1", other.getsockname()[1])
        monkeypatch.setattr(
            doctor, "check_port", lambda host, port, served_by_workspace: busy(served_by_workspace=False)
        )
        checks = doctor.examine(tmp_path, say=lambda line: None, import_libraries=False)
        (port,) = (check for check in checks if check.name == "port")
    assert port.level == "ok" and port.message.endswith(
        "is used by another process; prl up without a file takes a free one"
    )


@pytest.mark.parametrize(("skew_s", "level"), [(0.0, "ok"), (2.0, "warning"), (-2.0, "warning"), (9.0, "broken")])
def test_clock_skew_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew_s: float, level: str) -> None:
    # As if it was written in this very moment, however late this process gets to it.
    monkeypatch.setattr(os, "fstat", lambda fd: SimpleNamespace(st_mtime=1000.0 + skew_s))
    check = doctor.check_clock(tmp_path, {}, 1000.0)
    assert check.level == level and (level == "ok" or "NTP" in check.advice)


def test_clock_skew_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fstat", lambda fd: SimpleNamespace(st_mtime=1000.0))
    check = doctor.check_clock(tmp_path, {"run_a": 940.0, "supervisor": 1003.0}, 1000.0)
    assert check.level == "warning" and "supervisor" in check.message


def test_descriptors_shm_lingering_and_daemons() -> None:
    assert [doctor.check_descriptors(soft, 8).level for soft in (1024, 1023, -1)] == ["ok", "warning", "ok"]
    assert [doctor.check_shared_memory(free).level for free in (64 << 20, 1 << 30, None)] == ["warning", "ok", "ok"]
    lingers = [doctor.check_lingering(has_systemd=s, lingers=x, user="u").level for s, x in ((1, 0), (1, 1), (0, 0))]
    assert lingers == ["warning", "ok", "ok"]
    assert doctor.check_daemons({"trainer": "running", "run_a": "failed"}).advice == "prl status, then prl logs run_a"
    assert doctor.check_daemons({}).level == "ok"


def test_the_workspace_must_be_a_folder_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert doctor.check_output_dir(tmp_path / "file").level == "broken"
    assert doctor.check_output_dir(tmp_path / "file" / "x").level == "broken"
    assert doctor.check_output_dir(tmp_path / "new" / "er").level == "ok"
    control = tmp_path / "run_a" / "control"
    control.mkdir(parents=True)
    assert doctor.check_output_dir(tmp_path).level == "ok"
    control.chmod(0o777)
    found = doctor.check_output_dir(tmp_path)
    assert found.message == f"other users of this machine may write to {control}"
    assert (found.level, found.advice) == ("warning", f"chmod go-w {control}")
    (tmp_path / "daemons").mkdir()
    os.chown(tmp_path / "daemons", -1, os.getgid())
    (tmp_path / "daemons").chmod(0o777)
    found = doctor.check_output_dir(tmp_path)
    assert (found.level, found.advice) == ("warning", f"chmod -R go-w {tmp_path}")
    assert found.message.endswith(" and 1 more"), found.message


@pytest.mark.parametrize(
    ("room", "level", "message"),
    [
        ({"f_files": 50_000, "f_favail": 50_000}, "ok", "50,000 of 50,000 free"),
        ({"f_files": 50_000, "f_favail": 9}, "warning", "9 of 50,000 free"),
        ({"f_files": 50_000, "f_favail": 0}, "broken", "0 of 50,000 free"),
        ({"f_files": 0, "f_favail": 0}, "ok", "without a limit"),
    ],
)
def test_inodes_are_counted(tmp_path: Path, look: Look, room: dict[str, int], level: str, message: str) -> None:  # noqa: F811
    look(workspace=room)
    found = doctor.check_inodes(tmp_path / "new")
    assert (found.level, found.message) == (level, message)


def test_a_mount_that_is_read_only_is_named(tmp_path: Path, look: Look) -> None:  # noqa: F811
    assert doctor.check_output_dir(tmp_path).level == "ok"
    look(workspace={"f_flag": os.ST_RDONLY})
    found = doctor.check_output_dir(tmp_path)
    assert found.level == "broken" and found.message.endswith("is mounted read-only")


def test_a_key_is_judged_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("canary")
    file.chmod(0o644)
    found = [doctor.check_key("K", env) for env in ({"K_FILE": str(file)}, {"K": "canary"}, {})]
    assert [check.level for check in found] == ["broken", "ok", "ok"] and "canary" not in str(found)


def test_a_library_that_cannot_be_imported_is_found_by_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert probe("torch") == ({}, "ImportError: libcudart.so.12: cannot open shared object file")
    (tmp_path / "torch.py").write_text("import time; time.sleep(600)")
    assert "more than 0.01 s" in str(probe("torch", timeout_s=0.01)[1])


def test_everything_is_looked_at_without_changing_anything(tmp_path: Path) -> None:
    found = list(examine(tmp_path / "none", say=lambda message: None, import_libraries=False))
    assert [check.name for check in found] == [
        *(
            "python",
            "packages",
            "torch",
            "transformers",
            "vllm",
            "output_dir",
            "file system",
            "disk",
            "inodes",
            "inotify",
            "port",
            "clock",
        ),
        *("descriptors", "/dev/shm", "lingering", "api key", "daemons"),
    ]
    assert all(check.advice for check in found if check.level != "ok") and list(tmp_path.iterdir()) == []


def test_a_taken_port_that_was_not_chosen_is_only_a_warning(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = OutputDir(tmp_path / "workspace").component_config("system")
        config.parent.mkdir(parents=True)
        config.write_text(f"[inference]\nport = {port}\n")
        found = {check.name: check for check in examine(tmp_path / "workspace", say=print, import_libraries=False)}
        assert found["port"].level == "broken" and str(port) in found["port"].message
    found = {check.name: check for check in examine(tmp_path, say=print, import_libraries=False)}
    assert found["port"].level in ("ok", "warning"), "the default port, which may be taken here"


@pytest.mark.parametrize(
    ("name", "by"), [("daemons", "folder"), ("tui", "path"), *in_full(("daemons", "path"), ("tui", "folder"))]
)
def test_a_foreign_package_of_our_name_is_found(name: str, by: str, tmp_path: Path) -> None:
    """As `prl` runs: its own package is found first, but a daemon begins its search in the working folder."""
    package, elsewhere = tmp_path / "foreign" / name, tmp_path / "elsewhere"
    package.mkdir(parents=True)
    elsewhere.mkdir()
    (package / "__init__.py").write_text("")
    code = "import sys; sys.path.remove(''); from daemons.cli import main; sys.path[:0] = ['']; main()"
    # A PYTHONPATH of the shell that runs the tests may name another checkout.
    environ = {**os.environ, "PYTHONPATH": str(package.parent) if by == "path" else ""}
    if by == "path":
        code = f"import sys; sys.path.remove({str(package.parent)!r}); {code}"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--quick", "--json"],
        cwd=package.parent if by == "folder" else elsewhere,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    (check,) = [each for each in json.loads(done.stdout)["checks"] if each["name"] == "packages"]
    assert done.returncode == 1 and check["level"] == "broken"
    assert check["message"].startswith(f"a daemon would import {name} from {package}, not from {ROOT / name}")
    told = f"rename {package}" if by == "folder" else "environment of its own"
    assert told in check["advice"]


def test_our_packages_are_ours_here() -> None:
    assert doctor.check_ours(packages_found(), HOME, Path("/")).level == "ok"
    assert doctor.check_ours({"tui": None}, Path("/a"), Path("/b")).message.endswith("from nowhere, not from /a/tui")
