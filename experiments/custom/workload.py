"""The workload of a run of your own layers. Sizes of micro-batches differ by at most one row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from experiments.base.workload import ExperimentWorkload, sample_shapes, update_key
from experiments.custom.batches import SpecBatches
from experiments.custom.experiment import CustomExperiment, build, update_factors
from experiments.custom.layers import find_layer_errors
from experiments.custom.loading import digest, load_spec
from experiments.custom.loss import units_of
from suite.errors import SuiteError, first_line
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.microbatch import sizes
from suite.pipeline.planning.profile import MicroBatch, Sample


@lru_cache(maxsize=4)
def _first_batch(source: str, seed: int, rows: int) -> tuple[Tensors, Tensors]:
    """Cached, because a plan needs it many times."""
    return SpecBatches(load_spec(source, seed), rows, seed).whole(0)


@lru_cache(maxsize=16)
def _layer_errors(source: str, seed: int, rows: int, least: int) -> tuple[str, ...]:
    """Cached, because a plan asks for every number of micro-batches that it tries. ``least`` are the rows of the
    smallest micro-batch."""
    spec = load_spec(source, seed)
    try:
        layers, loss = build(spec)
        inputs, targets = _first_batch(source, seed, rows)
        SpecBatches(spec, rows, seed).check_prefetch()
        if spec.valid is not None:
            _ = SpecBatches(spec, rows, seed).held_out(1)[0]
        for index, layer in enumerate(layers):
            for name, parameter in layer.named_parameters():
                if parameter.requires_grad:
                    update_factors(spec, f"{index}.{name}", parameter)
        found = find_layer_errors(layers, loss, tuple(t[:least] for t in inputs), tuple(t[:least] for t in targets))
    except SuiteError as error:
        return (str(error),)
    except Exception as error:
        return (f"{source} does not describe a model that can be trained: {type(error).__name__}: {first_line(error)}",)
    return tuple(found)


@dataclass(frozen=True)
class Custom(ExperimentWorkload):
    """The workload of a run of your own layers."""

    experiment: CustomExperiment

    def with_experiment(self, experiment: CustomExperiment) -> Custom:
        """Returns the workload of another experiment."""
        return Custom(experiment)

    @property
    def examples(self) -> int:
        """Rows of a step."""
        return self._rows()

    @property
    def most_rows(self) -> int | None:
        """Rows of a step."""
        return self._rows()

    def _first_batch(self) -> tuple[Tensors, Tensors]:
        return _first_batch(self.experiment.source, self.experiment.train.seed, self.experiment.train.batch_rows)

    def _rows(self) -> int:
        return len(self._first_batch()[0][0])

    def setting_errors(self) -> list[str]:
        """What the layers, the loss and the data stumble over, tried on the rows of the smallest micro-batch."""
        experiment, pipeline = self.experiment, self.pipeline
        try:
            least = sizes(self._rows(), pipeline.replicas * max(1, pipeline.micro_batches))[-1]
        except SuiteError as error:
            return [str(error)]
        errors = _layer_errors(experiment.source, experiment.train.seed, experiment.train.batch_rows, least)
        every = experiment.train.validate_every
        if every is not None and experiment.spec.valid is None:
            errors += (
                f"train.validate_every={every}, but {experiment.source} has no held-out data; set valid of its "
                "TrainSpec, or train.validate_every=none",
            )
        return list(errors)

    def sample(self) -> Sample:
        """The rows of the first step."""
        inputs, targets = self._first_batch()
        parts = sizes(len(inputs[0]), self.pipeline.replicas * self.pipeline.micro_batches)

        def first(rows: int) -> MicroBatch:
            return MicroBatch(tuple(t[:rows] for t in inputs), tuple(t[:rows] for t in targets))

        typical = first(parts[len(parts) // 2])
        units = units_of(
            load_spec(self.experiment.source, self.experiment.train.seed), typical.targets or typical.inputs
        )
        return Sample(typical, first(parts[0]), units)

    def key(self) -> str:
        """The file of the function, the layers, the shapes of the sample, and the update."""
        layers, loss = self.experiment.build()
        shapes = sample_shapes(self.sample())
        return repr(
            (self.experiment.source, digest(self.experiment.source), layers, loss, shapes, update_key(self.optimizer))
        )

    def with_share(self, share: float) -> tuple[Custom, str]:
        """With fewer rows per mini-batch."""
        setting = f"train.batch_rows={max(1, int(self.batch * share))}"
        return self.with_experiment(self.experiment.with_settings(setting)), setting
