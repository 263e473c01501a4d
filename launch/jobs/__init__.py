"""Runs as jobs on a Ray cluster: submitted, listed, followed, stopped, fetched."""
