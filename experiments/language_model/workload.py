"""The workload of a language model. All micro-batches are equal up to one sequence; costs do not depend on the text."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.base.workload import ExperimentWorkload, sample_shapes, update_key
from experiments.language_model.experiment import LanguageModelExperiment
from experiments.language_model.runs import SEQUENCES, transformer
from experiments.translation.workload import random_ids
from models.language_model import LanguageModelShape
from suite.pipeline.planning.profile import MicroBatch, Sample
from suite.settings import DocumentSettings, OptimizerSettings, PipelineSettings


@dataclass(frozen=True)
class LanguageModel(ExperimentWorkload):
    """The workload of a Transformer-L."""

    experiment: LanguageModelExperiment

    @classmethod
    def of(
        cls, shape: LanguageModelShape, pipeline: PipelineSettings, optimizer: OptimizerSettings | None = None,
        sequences: int = SEQUENCES,
    ) -> LanguageModel:  # fmt: skip
        """Returns the workload of a model that is only planned or measured, with the default optimizer."""
        run = transformer(shape.layers)
        update = {
            "model": shape, "text": DocumentSettings(vocabulary=shape.vocabulary, length=shape.time),
            "pipeline": pipeline, "optimizer": optimizer or OptimizerSettings(),
            "train": run.train.model_copy(update={"batch_sequences": sequences}),
        }  # fmt: skip
        return cls(run.model_copy(update=update))

    def with_experiment(self, experiment: LanguageModelExperiment) -> LanguageModel:
        """Returns the workload of another experiment."""
        return LanguageModel(experiment)

    @property
    def examples(self) -> int:
        """Sequences of a step."""
        return self.experiment.train.batch_sequences

    @property
    def most_rows(self) -> int | None:
        """Sequences of a step."""
        return self.examples

    def sample(self) -> Sample:
        """Full sequences."""
        rows = -(-self.examples // (self.pipeline.replicas * self.pipeline.micro_batches))
        ids = random_ids(rows, self.experiment.model.time, self.experiment.model.vocabulary)
        micro_batch = MicroBatch((ids,), (ids,))
        return Sample(micro_batch, micro_batch)

    def key(self) -> str:
        """Costs depend on the shape, the rows of a micro-batch and the update."""
        return repr((self.experiment.model, sample_shapes(self.sample()), update_key(self.optimizer)))

    def with_share(self, share: float) -> tuple[LanguageModel, str]:
        """With fewer sequences per mini-batch."""
        setting = f"train.batch_sequences={max(1, int(self.examples * share))}"
        return self.with_settings(setting), setting
