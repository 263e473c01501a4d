"""Runs as jobs on a Ray cluster: the checkout is packed, submitted and followed; the rest is Ray's `ray job`."""
