"""How long tests wait for something that comes on every machine, however slow and busy it is.

Waits are for conditions and end with them, so this costs nothing where the code works. It is ten times what the longest
wait takes on an idle machine with two cores (a vLLM server that starts: 60 s). Where a deadline itself is tested, it
stands in the test. `PRL_TEST_PATIENCE_S` shortens it while debugging a wait that never ends.
"""

import os

PATIENCE_S = float(os.environ.get("PRL_TEST_PATIENCE_S", "600"))
