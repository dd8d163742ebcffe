"""The mount table: real lines of many kinds of machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.utils.watch import events_come, file_system_type, parse_mounts

MOUNTS = """\
22 1 254:0 / / rw - ext4 /dev/root rw
40 22 0:35 / /data rw,relatime shared:1 - nfs4 server:/x rw
41 40 0:36 / /data/fast\\040disk rw - xfs /dev/sdb rw
42 22 0:37 / /blob rw - fuse.blobfuse2 blob rw
43 22 0:38 / /over rw - ext4 /dev/sdc rw
44 22 0:39 / /over rw - autofs systemd-1 rw
45 44 0:40 / /over rw - nfs server:/y rw
"""


@pytest.mark.parametrize(
    ("folder", "kind", "events"),
    [
        ("/home", "ext4", True),
        ("/data/x", "nfs4", False),
        ("/data/fast disk/x", "xfs", True),
        ("/blob/x", "fuse.blobfuse2", False),
        ("/database", "ext4", True),
        ("/over/x", "nfs", False),
    ],
)
def test_the_longest_and_last_mount_counts(tmp_path: Path, folder: str, kind: str, events: bool) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    assert file_system_type(Path(folder), table) == kind
    assert events_come(Path(folder), table) is events


SAMPLES = [
    ("101 100 0:45 / /m rw,relatime master:1 - overlay overlay rw,lowerdir=/l/1:/l/2,upperdir=/u,workdir=/w", True),
    ("36 35 98:0 /mnt1 /m rw,noatime master:1 propagate_from:2 unbindable - btrfs /dev/sda2 rw,subvol=/@home", True),
    ("30 23 0:26 / /m rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,size=1G", True),
    ("99 23 0:50 / /m rw,noatime - zfs tank/home rw,xattr,noacl", True),
    ("215 29 0:53 / /m rw shared:1 - nfs4 10.0.0.5:/export rw,vers=4.2,rsize=1048576,hard", False),
    ("216 29 0:54 / /m rw - nfs filer:/vol/home rw,vers=3", False),
    ("217 29 0:55 / /m rw - cifs //server/share rw,vers=3.1.1", False),
    ("218 29 0:56 / /m rw - smb3 //server/share rw", False),
    ("219 29 0:57 / /m rw,flock - lustre 10.1.1.1@o2ib:/scratch rw", False),
    ("220 29 0:58 / /m rw - fuse.sshfs user@host:/ rw,user_id=1000", False),
    ("221 29 0:59 / /m rw - fuse.juicefs JuiceFS:vol rw", False),
    ("222 29 0:60 / /m rw - fuse.gcsfuse bucket rw", False),
    ("223 29 0:61 / /m rw - 9p C:\\134 rw,dirsync,aname=drvfs", False),
    ("224 29 0:62 / /m rw - virtiofs workspace rw", False),
    ("225 29 0:63 / /m rw - ceph 10.0.0.1:6789:/ rw,name=admin", False),
    ("226 29 0:64 / /m rw - gpfs fs1 rw", False),
    ("227 29 0:65 / /m rw - beegfs beegfs_nodev rw", False),
    ("228 29 0:66 / /m rw - wekafs default rw", False),
    ("229 29 0:67 / /m rw - vboxsf work rw", False),
    ("230 29 0:68 / /m rw - afs AFS rw", False),
]


@pytest.mark.parametrize(("line", "events"), SAMPLES)
def test_which_file_systems_tell(tmp_path: Path, line: str, events: bool) -> None:
    table = tmp_path / "mountinfo"
    table.write_text("22 1 254:0 / / rw - ext4 /dev/root rw\n" + line + "\n")
    assert events_come(Path("/m/workspace"), table) is events


def test_a_link_is_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    table = tmp_path / "mountinfo"
    table.write_text(f"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:9 / {tmp_path.resolve()}/real rw - nfs4 s:/x rw\n")
    assert not events_come(tmp_path / "link", table)


def test_what_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    assert events_come(tmp_path, tmp_path / "none")
    table = tmp_path / "mountinfo"
    table.write_bytes(b"torn line\n\xff\xfe - \n22 1 254:0 / / rw\n")
    assert file_system_type(tmp_path, table) is None
    assert parse_mounts("1 0 8:1 / /a\\011b\\134c rw - xfs /dev/x rw") == [(Path("/a\tb\\c"), "xfs", "/dev/x")]
    assert file_system_type(tmp_path) is not None, "this machine has a table"
