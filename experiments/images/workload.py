"""The workload of a run on images, or of any AmoebaNet. Sizes of micro-batches differ by at most one image."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from experiments.base.workload import ExperimentWorkload, sample_shapes, update_key
from experiments.images.experiment import ImageExperiment
from suite.pipeline.model.microbatch import sizes
from suite.pipeline.planning.profile import MicroBatch, Sample
from suite.settings import ImageSettings, ImageTrainSettings, OptimizerSettings, PipelineSettings

SIZE, BATCH = 224, 128
"""Table 1 has images of 224 x 224 and mini-batches of 128."""


@dataclass(frozen=True)
class Classification(ExperimentWorkload):
    """The workload of a run on images."""

    experiment: ImageExperiment

    def with_experiment(self, experiment: ImageExperiment) -> Classification:
        """Returns the workload of another experiment."""
        return Classification(experiment)

    @property
    def examples(self) -> int:
        """Images of a step; half as many if BatchNorm needs two per micro-batch."""
        lone = self.experiment.model.last_size(self.experiment.images.size) == 1
        return self.batch // 2 if lone else self.batch

    @property
    def most_rows(self) -> int | None:
        """Images of a step."""
        return self.batch

    def sample(self) -> Sample:
        """Random images: costs do not depend on the content."""
        pipeline = self.pipeline
        parts = sizes(self.batch, pipeline.replicas * pipeline.micro_batches)
        typical = parts[len(parts) // 2]
        return Sample(self._images(typical), self._images(parts[0]), typical)

    def _images(self, rows: int) -> MicroBatch:
        model, size = self.experiment.model, self.experiment.images.size
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(rows, model.channels, size, size, generator=generator)
        return MicroBatch((images,), (torch.randint(0, model.classes, (rows,), generator=generator),))

    def key(self) -> str:
        """The model, the shapes of the sample, and the update."""
        return repr((self.experiment.model, sample_shapes(self.sample()), update_key(self.optimizer)))

    def with_share(self, share: float) -> tuple[Classification, str]:
        """With fewer images per mini-batch."""
        setting = f"train.batch_images={max(1, int(self.batch * share))}"
        return self.with_settings(setting), setting


def find_amoebanet(name: str, devices: int) -> Classification | None:
    """Returns ``amoebanet_<L>x<D>`` of Table 1 with one stage per device; None for any other name.

    Micro-batches have one image unless set, for the least memory per stage. Raises SettingError when no AmoebaNet-D has
    these numbers.
    """
    match = re.fullmatch(r"amoebanet_([0-9]{1,4})x([0-9]{1,6})", name)
    if match is None:
        return None
    shape = {"layers": int(match[1]), "filters": int(match[2])}
    values = {
        "name": name, "scale": "paper", "model": shape, "images": ImageSettings(source="ILSVRC/imagenet-1k", size=SIZE),
        "pipeline": PipelineSettings(), "optimizer": OptimizerSettings(name="rmsprop", beta2=0.9),
        "train": ImageTrainSettings(batch_images=BATCH, steps=100_000),
    }  # fmt: skip
    work = Classification(ImageExperiment.validated(values))
    stages = max(1, min(devices, work.experiment.list_length))
    return work.with_pipeline(PipelineSettings(stages=stages, micro_batches=BATCH, remat="auto"))
