"""Images for the workers: which classes they are of, and what is easily reached on the held-out ones."""

import numpy as np
import pytest

from experiments.images.source import ImageSource
from suite.data.images.prepare import folder_of_images, prepare_images
from suite.data.images.transforms import ImageData
from suite.errors import DataError
from suite.pipeline.model.topology import RankCoord
from suite.settings import ImageSettings, ImageTrainSettings, PipelineSettings
from suite.training.validation import HeldOut
from tests.suite.data.images.pictures import SIZE, write_folder, write_idx
from tests.suite.data.images.test_class_folder import write


def source(folder, cache, channels=1, classes=4, **train):
    settings = ImageSettings(source=str(folder), size=SIZE)
    prepare_images(settings, channels, classes, cache, print)
    train = ImageTrainSettings(batch_images=3, **train)
    return ImageSource(
        folder_of_images(settings, cache), RankCoord(0, 1, 1), settings, train, PipelineSettings(micro_batches=2)
    )


@pytest.mark.parametrize(("test_images", "share"), [(None, 6 / 8), (5, 4 / 5)])
def test_the_baseline_is_that_of_the_images_that_are_scored(tmp_path, monkeypatch, test_images, share):
    """Of a test set that is sorted by class: six images of class 0, then two of class 1."""
    monkeypatch.setattr(ImageData, "pixels", lambda *_: pytest.fail("decoded"))
    folder = write_folder(tmp_path / "sorted", test=8)
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", np.array([0] * 6 + [1] * 2, dtype=np.uint8))
    images = source(folder, tmp_path / "cache", test_images=test_images)
    assert images.baselines(HeldOut([])) == {"most_frequent_class": pytest.approx(share)}


def test_a_checkpoint_of_other_classes_is_refused(tmp_path):
    own = tmp_path / "own"
    write(own, "train", 20)
    before = source(own, tmp_path / "cache").notes()
    assert before["classes"] == ["ant", "bee"]
    assert source(own, tmp_path / "cache").check(before) == ""
    assert source(own, tmp_path / "cache").check({"images": str(own)}) == ""  # of a version that did not note classes
    (own / "train/ant").rename(own / "train/cow")  # now the bees have label 0
    with pytest.raises(DataError, match=r"trained on .*own, and not on .*own with its present classes; restore"):
        source(own, tmp_path / "cache").check(before)
