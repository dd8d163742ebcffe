"""The terminal view of one workspace of runs.

Layer 4: meets the rest through files, `daemons.client` and `.actions`.
"""
