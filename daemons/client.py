"""Reading a workspace from another program: this name was there first, so what uses it goes on working.

Nothing here imports it: the homes of its names are `workspace_reader` and `workspace`.
"""

from __future__ import annotations

from daemons.workspace import SUPERVISOR, DaemonView, RefusedView, RunView, Workspace
from daemons.workspace_reader import WorkspaceReader, read_workspace

__all__ = [
    "SUPERVISOR",
    "DaemonView",
    "RefusedView",
    "RunView",
    "Workspace",
    "WorkspaceReader",
    "read_workspace",
]
