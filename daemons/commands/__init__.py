"""The commands of `prl`, by subject: the workspace, the runs, single components. Thin: `launch` and `actions` act."""
