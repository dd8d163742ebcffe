"""Monitors: where a run's metrics go beside its JSONL files, in a process of their own. Off unless a run asks."""
