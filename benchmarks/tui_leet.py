"""A folder of W&B runs for `wandb leet`, with the numbers of a `tui_workspace`, as W&B's own process writes them.

A `.wandb` file is a log in LevelDB's format: blocks of 32 KiB, records with checksum, length and kind, each record a
protocol buffer. Only what `leet` reads is written.
"""

from __future__ import annotations

import json
import math
import struct
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

BLOCK = 32768
HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class WandbLog:
    """Appends records to one file, a new one or one that is there."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        self._at = path.stat().st_size
        if not self._at:
            self._put(struct.pack("<4sHB", b":W&B", 0xBEE1, 0))

    def write(self, data: bytes) -> None:
        """Append one record, in pieces where it does not fit in the rest of its block."""
        kind, rest = FIRST, data
        while True:
            room = BLOCK - self._at % BLOCK
            if room < HEADER.size:
                self._put(b"\0" * room)
                continue
            piece, rest = rest[: room - HEADER.size], rest[room - HEADER.size :]
            if not rest:
                kind = FULL if kind == FIRST else LAST
            checksum = zlib.crc32(piece, zlib.crc32(bytes([kind])))
            self._put(HEADER.pack(checksum, len(piece), kind) + piece)
            if not rest:
                return
            kind = MIDDLE

    def flush(self) -> None:
        """Give the operating system what is buffered."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._at += len(data)


def history_record(step: int, figures: Mapping[str, float]) -> bytes:
    from wandb.proto import wandb_internal_pb2 as pb

    record = pb.Record(num=step + 1)
    record.history.step.num = step
    for key, value in {**figures, "_step": step, "_timestamp": 1.79e9 + step}.items():
        record.history.item.add(nested_key=[key], value_json=json.dumps(value))
    return bytes(record.SerializeToString())


def run_record(run_id: str) -> bytes:
    from wandb.proto import wandb_internal_pb2 as pb

    record = pb.Record(num=1)
    record.run.run_id, record.run.display_name, record.run.project = run_id, run_id, "bench"
    record.run.start_time.FromSeconds(int(time.time()))  # without a fraction: all records are of one length
    return bytes(record.SerializeToString())


def two_figures(step: int) -> dict[str, float]:
    return {"reward": round(0.9 * (1 - math.exp(-step / 700)), 5), "loss": -0.05 * math.sin(step), "lr": 1e-3}


def make_runs(folder: Path, num_runs: int, records: Iterable[bytes]) -> list[Path]:
    """`num_runs` runs with the same records, in a `wandb` folder; the files, oldest first."""
    body = list(records)
    made: list[Path] = []
    for number in range(num_runs):
        run_id = f"run{number:05d}"
        run_dir = folder / f"offline-run-20261121_{number // 3600:02d}{number // 60 % 60:02d}{number % 60:02d}-{run_id}"
        run_dir.mkdir(parents=True)
        path = run_dir / f"run-{run_id}.wandb"
        if made:
            # Ids have one length, so all that follows the first record lies at the same place.
            data = made[0].read_bytes().replace(b"run00000", run_id.encode())
            path.write_bytes(_with_first_record(data, run_record(run_id)))
        else:
            log = WandbLog(path)
            for record in (run_record(run_id), *body):
                log.write(record)
            log.close()
        made.append(path)
    return made


def _with_first_record(data: bytes, record: bytes) -> bytes:
    """`data` with another first record of the same length."""
    length = HEADER.unpack_from(data, 7)[1]
    if len(record) != length:
        raise ValueError(f"a first record of {len(record)} bytes where one of {length} was")
    checksum = zlib.crc32(record, zlib.crc32(bytes([FULL])))
    return data[:7] + HEADER.pack(checksum, length, FULL) + record + data[7 + HEADER.size + length :]
