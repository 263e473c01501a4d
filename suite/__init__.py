"""The engine of the GPipe suite. Its public names are here; docs/own-model.md shows how to use them."""

from suite.train_spec import TrainSpec

__all__ = ["TrainSpec"]
