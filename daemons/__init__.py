"""Daemons: the `prl` command, the supervisor, and what others may read and do through them. Layer 3.

`workspace_reader` reads a workspace, `actions` and its neighbours change runs. Daemons are started with
`sys.executable -m ...` and never imported, so importing this package loads no torch, vLLM or transformers.
"""
