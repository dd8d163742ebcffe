"""The terminal view of one workspace of runs.

Layer 4: reads files, and uses what of `daemons` reads a workspace (`workspace_reader`) and changes runs (`actions`).
"""
