"""Benchmarks: each is a ratio in one run against what a user would take instead."""
