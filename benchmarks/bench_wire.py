"""The hand-over of a batch through a file, against the two formats that one would take instead: JSON and pickle.

128 samples of 512 tokens. Pickle is not an option for files of tenants (it runs code); it is here to show the price.
"""

from __future__ import annotations

import json
import pickle
import random
import tempfile
from pathlib import Path

import msgspec

from benchmarks.frame import paired_ratio
from prime_rl.contract.types import TrainingBatch, TrainingSample, read_columns, write_batch

NUM_SAMPLES, NUM_TOKENS = 128, 512


def run() -> dict[str, float]:
    batch = make_batch()
    with tempfile.TemporaryDirectory() as folder:
        path, json_path, pickle_path = (Path(folder) / name for name in ("b.msgpack", "b.json", "b.pickle"))
        write_batch(path, batch)
        plain = msgspec.to_builtins(batch)
        json_path.write_text(json.dumps(plain), encoding="utf-8")
        pickle_path.write_bytes(pickle.dumps(plain))
        return {
            "write_vs_json": paired_ratio(
                lambda: _write_new(path, batch), lambda: json_path.write_text(json.dumps(plain), encoding="utf-8")
            ),
            "read_vs_json": paired_ratio(
                lambda: read_columns(path), lambda: json.loads(json_path.read_text(encoding="utf-8"))
            ),
            "read_vs_pickle": paired_ratio(lambda: read_columns(path), lambda: pickle.loads(pickle_path.read_bytes())),
            "size_vs_json": path.stat().st_size / json_path.stat().st_size,
        }


def _write_new(path: Path, batch: TrainingBatch) -> None:
    path.unlink()
    write_batch(path, batch)


def make_batch() -> TrainingBatch:
    rng = random.Random(0)
    samples = [
        TrainingSample(
            token_ids=[rng.randrange(150_000) for _ in range(NUM_TOKENS)],
            loss_mask=[index >= NUM_TOKENS // 2 for index in range(NUM_TOKENS)],
            logprobs=[-rng.random() for _ in range(NUM_TOKENS)],
            advantage=rng.gauss(0, 1),
            reward=rng.random(),
            temperature=1.0,
            policy_version=3,
            example_id=f"reverse-text/{number}",
        )
        for number in range(NUM_SAMPLES)
    ]
    return TrainingBatch("run_a", 5, samples, {"next_index": 128})
