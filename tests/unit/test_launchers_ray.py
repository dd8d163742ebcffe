"""The launcher on Ray without a cluster. Over a real one: `test_ray`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from prime_rl.contract.layout import OutputDir
from tests.patience import PATIENCE_S

WITHOUT_RAY = """
import sys, time
sys.modules["ray"] = None  # an import of it fails
from pathlib import Path
from daemons.launchers.base import Ended
from daemons.launchers.ray import RayLauncher
from daemons.specs import DaemonSpec
from prime_rl.contract.layout import OutputDir
output = OutputDir(Path(sys.argv[1]))
launcher = RayLauncher(output)
handle = launcher.start(DaemonSpec("trainer", ("true",), output.log("trainer")))
while not isinstance(seen := launcher.look(handle), Ended):
    time.sleep(0.1)
print(seen.reason)
"""


def test_without_the_package_the_reason_has_the_command_that_installs_it(tmp_path: Path) -> None:
    """In a process of its own, for the thread that speaks to Ray ends with its process."""
    output = OutputDir(tmp_path)
    output.daemons.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.stdout == 'the package ray is not installed: pip install "prl-multirun[ray]"\n', done.stderr
