"""The commands of `prl`, by subject: the house, the runs, single components. Thin: `launch` and `actions` act."""
