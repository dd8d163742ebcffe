"""Monitors: where a run's metrics go beside its JSONL files, in a separate process. Off unless a run asks."""
