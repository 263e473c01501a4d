"""Others' pipelines behind one small interface, to be timed beside the suite's on the same work."""
