"""Rollouts and training over several nodes that share a folder: fourteen phases with a barrier after each."""
