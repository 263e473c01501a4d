"""Runs as jobs on a Ray cluster: submit, list, follow, stop, fetch."""
