"""Daemons: the `prl` command, the supervisor, and what others may read and do through them. Layer 3.

`client` reads a workspace, `actions` changes runs; the TUI uses only these two. Daemons are started with
`sys.executable -m ...` and never imported, so importing this package loads no torch, vLLM or transformers.
"""
