"""Other pipeline engines behind one small interface, timed beside the suite on the same workload."""
