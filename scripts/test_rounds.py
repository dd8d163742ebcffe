"""`make test` again and again beside busy loops, in another order each time: `scripts/test_rounds.py ROUNDS LOOPS`.

It is for hours in which a machine has nothing else to do: what hangs on luck, on order or on a quick machine shows. One
line for each round with the seed of its order, which PRL_TEST_ORDER gives again; the output of pytest is in
build/test_rounds/. Exit codes: 0 all passed, 1 a round failed, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "test_rounds"
BUSY = "import os\nfor _ in range({}):\n    if os.fork() == 0: break\nwhile True: pass"


def play(seed: int, loops: int) -> bool:
    """One round; true when all tests passed."""
    log, start_s = LOGS / f"{seed}.txt", time.monotonic()
    with ExitStack() as stack, log.open("wb") as file:
        if loops:  # in a session of their own, as in another terminal
            busy = subprocess.Popen([sys.executable, "-c", BUSY.format(loops - 1)], start_new_session=True)
            stack.callback(busy.wait)
            stack.callback(os.killpg, busy.pid, signal.SIGKILL)
        environ = {**os.environ, "PRL_TEST_ORDER": str(seed)}
        code = subprocess.call(["make", "test"], cwd=ROOT, env=environ, stdout=file, stderr=subprocess.STDOUT)
    lines = log.read_text(errors="replace", encoding="utf-8").splitlines() or [""]
    for line in [line for line in lines if line.startswith(("FAILED", "ERROR "))]:
        print(f"  {line[:300]}")
    last = next((line for line in reversed(lines) if " passed" in line or " failed" in line), lines[-1])
    print(f"order {seed}: {last.strip('= ')} ({time.monotonic() - start_s:.0f} s)", flush=True)
    return code == 0


def main() -> int:
    """Play all rounds. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rounds", nargs="?", type=int, default=10, help="how often (default: 10)")
    parser.add_argument("loops", nargs="?", type=int, default=4, help="processes that only burn CPU (default: 4)")
    wanted = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    first = int(time.time())
    try:
        passed = [play(first + number, wanted.loops) for number in range(wanted.rounds)]
    except KeyboardInterrupt:
        return 130
    print(f"{sum(passed)} of {len(passed)} rounds passed")
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
