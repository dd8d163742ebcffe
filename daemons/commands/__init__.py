"""The commands of `prl`, by subject: the workspace, the runs, single components. `up_and_down` and `actions` act."""
