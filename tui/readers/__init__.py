"""Readers of files. Each is called by one thread. No widgets, no screens."""
