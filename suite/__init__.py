"""The engine of the GPipe suite. Its public names are here; docs/own-model.md shows how to use them."""

from suite.sweep_spec import SweepRun, SweepSpec
from suite.train_spec import TrainSpec

__all__ = ["SweepRun", "SweepSpec", "TrainSpec"]
