"""The workload of a run of your own layers. Sizes of micro-batches differ by at most one row."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from experiments.base.workload import ExperimentWorkload, sample_shapes, update_key
from experiments.custom.experiment import CustomExperiment
from experiments.custom.layers import find_faults
from suite.errors import SuiteError
from suite.pipeline.model.layers import structure_key
from suite.pipeline.model.microbatch import sizes
from suite.pipeline.planning.profile import MicroBatch, Sample

CHECKED_ROWS = 2
"""Rows that the layers are tried with before workers start. BatchNorm needs two."""


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

    def _rows(self) -> int:
        inputs, _ = self.experiment.batches().whole(0)
        return len(inputs[0])

    def faults(self) -> list[str]:
        """What the layers stumble over, tried on a few rows."""
        try:
            layers, loss = self.experiment.build()
            inputs, targets = self.experiment.batches().whole(0)
        except SuiteError as error:
            return [str(error)]
        rows = slice(CHECKED_ROWS)
        return find_faults(layers, loss, tuple(t[rows] for t in inputs), tuple(t[rows] for t in targets))

    def sample(self) -> Sample:
        """The rows of the first step."""
        inputs, targets = self.experiment.batches().whole(0)
        parts = sizes(len(inputs[0]), self.pipeline.replicas * self.pipeline.micro_batches)

        def first(rows: int) -> MicroBatch:
            return MicroBatch(tuple(t[:rows] for t in inputs), tuple(t[:rows] for t in targets))

        return Sample(first(parts[len(parts) // 2]), first(parts[0]))

    def key(self) -> str:
        """The layers and where they come from, the sample_shapes of the sample, and the update."""
        layers, loss = self.experiment.build()
        described = repr((layers, loss, [structure_key(layer) for layer in layers]))
        digest = hashlib.sha256(described.encode()).hexdigest()
        return repr((self.experiment.source, digest, sample_shapes(self.sample()), update_key(self.optimizer)))

    def with_share(self, share: float) -> tuple[Custom, str]:
        """With fewer rows per mini-batch."""
        setting = f"train.batch_rows={max(1, int(self.batch * share))}"
        return self.with_experiment(self.experiment.with_settings(setting)), setting
