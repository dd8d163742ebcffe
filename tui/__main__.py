"""`python -m tui` is `prl-tui`."""

import sys

from tui.cli import main

sys.exit(main())
