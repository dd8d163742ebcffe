"""The tests marked `numeric` on every instruction set of this CPU: `scripts/test_cpus.py [PATH]...`.

torch, oneDNN and MKL choose their kernels by environment variables, which the processes that tests start inherit. Each
instruction set is run twice, so that a test that hangs on luck has two chances to show it. One line for each run; the
output of pytest is in build/test_cpus/. Exit codes: 0 all passed, 1 a run failed, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "test_cpus"
CPUINFO = Path("/proc/cpuinfo")
NUM_ROUNDS = 2


@dataclass(frozen=True)
class Variant:
    """One instruction set: the flags that a CPU needs for it, and how torch, oneDNN and MKL are kept to it."""

    name: str
    flags: frozenset[str]
    onednn: str
    mkl: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables that keep torch, oneDNN and MKL to this instruction set."""
        return {
            "ATEN_CPU_CAPABILITY": self.name,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
        }


# The fastest first: it makes the models that all runs share.
VARIANTS = (
    Variant("avx512", frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}), "AVX512_CORE", "AVX512"),
    Variant("avx2", frozenset({"avx2", "fma"}), "AVX2", "AVX2"),
    Variant("default", frozenset(), "SSE41", "SSE4_2"),
)


@dataclass(frozen=True)
class Counts:
    """Tests of one run, from pytest's XML."""

    passed: int
    failed: list[str]

    @classmethod
    def read(cls, path: Path) -> Counts:
        """Count the tests in the XML file; zero without it. Skipped ones count neither as passed nor as failed."""
        if not path.exists():
            return cls(0, [])
        cases = list(ElementTree.parse(path).iter("testcase"))
        failed = [
            f"{case.get('classname')}::{case.get('name')}"
            for case in cases
            if {"failure", "error"} & {c.tag for c in case}
        ]
        skipped = sum(case.find("skipped") is not None for case in cases)
        return cls(len(cases) - len(failed) - skipped, failed)


def cpu_flags(text: str) -> set[str]:
    """Of the first CPU of /proc/cpuinfo; none where it has no such line."""
    lines = (line.partition(":") for line in text.splitlines())
    return next((set(value.split()) for key, _, value in lines if key.strip() == "flags"), set())


def run(variant: Variant, number: int, models: str, logs: Path, paths: list[str]) -> bool:
    """One run of the tests; whether all passed."""
    name = f"{variant.name}_{number}"
    log, report = logs / f"{name}.log", logs / f"{name}.xml"
    report.unlink(missing_ok=True)
    # What a test costs is limited elsewhere, and for the kernels of the machine.
    own = {"PRL_TEST_MODELS": models, "PRL_TEST_LIMIT_S": "inf", "PRL_TEST_DURATIONS": str(logs / f"{name}.json")}
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", f"--junitxml={report}", *paths]
    command += ["-m", "numeric and not vllm and not gpu"]
    start_s = time.monotonic()
    with log.open("wb") as out:
        # Its own session: Ctrl-C reaches pytest once, from here, and pytest ends what its tests have started.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **variant.environment, **own},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    counts, took_s = Counts.read(report), time.monotonic() - start_s
    print(f"{variant.name} {number}: {counts.passed} passed, {len(counts.failed)} failed in {took_s:.0f} s", flush=True)
    for test in counts.failed:
        print(f"  failed: {test}", flush=True)
    if code:
        print(f"  pytest ended with exit code {code}: see {log}", flush=True)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, default=LOGS, help="folder for the output of pytest")
    parser.add_argument("paths", nargs="*", help="tests to run (default: all)")
    arguments = parser.parse_args()
    logs: Path = arguments.logs
    logs.mkdir(parents=True, exist_ok=True)
    flags = cpu_flags(CPUINFO.read_text(encoding="utf-8")) if CPUINFO.exists() else set()
    results = []
    try:
        with tempfile.TemporaryDirectory(prefix="prl_models_") as models:
            for variant in VARIANTS:
                if missing := variant.flags - flags:
                    print(f"{variant.name}: skipped, this CPU does not have {', '.join(sorted(missing))}", flush=True)
                    continue
                results += [run(variant, number, models, logs, arguments.paths) for number in range(1, NUM_ROUNDS + 1)]
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", flush=True)
        return 130
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
