"""Jobs that change runs, daemons and the workspace, as `prl` does. Without screens; not imported when read-only."""
