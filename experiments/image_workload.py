"""A run on images, or any AmoebaNet, as the plan sees it: all micro-batches are alike but for one image."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from experiments.image_experiment import ImageExperiment
from experiments.workload import OfExperiment, shapes, update_key
from suite.pipeline.microbatch import sizes
from suite.pipeline.profile import MicroBatch, Sample
from suite.settings import ImageSettings, ImageTrainSettings, OptimizerSettings, PipelineSettings

SIZE, BATCH = 224, 128
"""Of Table 1: images of 224 x 224, mini-batches of 128."""


@dataclass(frozen=True)
class Classification(OfExperiment):
    """One of the runs on images."""

    experiment: ImageExperiment

    def remade(self, experiment: ImageExperiment) -> Classification:
        """The same work."""
        return Classification(experiment)

    @property
    def examples(self) -> int:
        """Images of a step; half as many where a norm needs two of a micro-batch."""
        lone = self.experiment.model.last_size(self.experiment.images.size) == 1
        return self.batch // 2 if lone else self.batch

    @property
    def most_rows(self) -> int | None:
        """All of them."""
        return self.batch

    def sample(self) -> Sample:
        """Images of noise: costs do not depend on what they show."""
        pipeline = self.pipeline
        parts = sizes(self.batch, pipeline.replicas * pipeline.micro_batches)
        return Sample(self._images(parts[len(parts) // 2]), self._images(parts[0]))

    def _images(self, rows: int) -> MicroBatch:
        model, size = self.experiment.model, self.experiment.images.size
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(rows, model.channels, size, size, generator=generator)
        return MicroBatch((images,), (torch.randint(0, model.classes, (rows,), generator=generator),))

    def key(self) -> str:
        """The model, the shapes of the sample, and what there is to an update."""
        return repr((self.experiment.model, shapes(self.sample()), update_key(self.optimizer)))

    def with_share(self, share: float) -> tuple[Classification, str]:
        """Fewer images a mini-batch."""
        setting = f"train.batch_images={max(1, int(self.batch * share))}"
        return self.remade(self.experiment.with_settings(setting)), setting


def find_amoebanet(name: str, devices: int) -> Classification | None:
    """Returns ``amoebanet_<L>x<D>`` as Table 1 has it, over as many stages as there are devices; None for another name.

    M is the mini-batch, micro-batches of one image, unless set: the least memory a stage. Raises SettingError when no
    AmoebaNet-D has these numbers.
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
