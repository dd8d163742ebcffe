"""The terminal view of one workspace of runs.

Layer 4: reads files and uses `daemons.client` and `.actions`.
"""
