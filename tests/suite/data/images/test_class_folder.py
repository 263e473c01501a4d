"""A folder of images with one folder a class: pixels, classes, held-out images, and errors."""

import os
import shutil
import unicodedata

import numpy as np
import pytest
import torch
from PIL import Image

from suite.data.images.batches import ImageBatches
from suite.data.images.prepare import folder_of_images, prepare_images
from suite.errors import DataError
from suite.settings import ImageSettings, ImageTrainSettings
from tests.suite.data.images.pictures import SIZE, images


def write(folder, split, count, seed=0, classes=("ant", "bee"), mode="L"):
    pixels, _ = images(count, seed)
    for at, picture in enumerate(pixels):
        path = folder / split / classes[at % len(classes)] / f"{at:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).convert(mode).save(path)
    return pixels


def prepared(folder, cache, channels=1, classes=2, log=print):
    return prepare_images(ImageSettings(source=str(folder), size=SIZE), channels, classes, cache, log)


@pytest.mark.parametrize("test_name", ["test", "val"])
def test_every_pixel_and_class_comes_back(tmp_path, test_name):
    train, test = write(tmp_path / "own", "train", 10), write(tmp_path / "own", test_name, 4, seed=1)
    data = prepared(tmp_path / "own", tmp_path / "cache")
    assert data.info.counts == {"train": 10, "test": 4}
    settings = ImageSettings(source=str(tmp_path / "own"), size=SIZE)
    ordered = np.concatenate([train[::2], train[1::2]])  # class by class
    assert data.pixels("train", range(10), settings).squeeze(1).numpy().tolist() == ordered.tolist()
    assert data.labels("train", range(10)).tolist() == [0] * 5 + [1] * 5
    assert data.labels("test", range(4)).tolist() == [0, 0, 1, 1]
    assert data.pixels("test", [0], settings).squeeze().numpy().tolist() == test[0].tolist()


def test_a_picture_of_a_camera_that_was_turned_comes_upright(tmp_path):
    """Orientation 6: the viewer turns the stored pixels clockwise."""
    (upright, *_), _ = write(tmp_path / "own", "train", 10), write(tmp_path / "own", "test", 4)
    orientation = Image.Exif()
    orientation[0x0112] = 6
    Image.fromarray(np.rot90(upright)).save(tmp_path / "own/train/ant/00.png", exif=orientation)
    data = prepared(tmp_path / "own", tmp_path / "cache")
    settings = ImageSettings(source=str(tmp_path / "own"), size=SIZE)
    assert data.pixels("train", [0], settings).squeeze().numpy().tolist() == upright.tolist()


def test_without_test_images_every_fifth_of_a_class_is_held_out(tmp_path):
    write(tmp_path / "own", "train", 24, mode="RGB")
    data = prepared(tmp_path / "own", tmp_path / "cache", channels=3)
    assert data.info.counts == {"train": 18, "test": 6}
    assert data.labels("test", range(6)).tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("changes", [{}, {"flip": True}])
def test_colour_images_keep_their_layout_in_memory(tmp_path, changes):
    """The set has colours last. Convolutions round differently for another layout."""
    write(tmp_path / "own", "train", 24, mode="RGB")
    data = prepared(tmp_path / "own", tmp_path / "cache", channels=3)
    settings = ImageSettings(source=str(tmp_path / "own"), size=SIZE, crop="none", **({"flip": False} | changes))
    found = ImageBatches(data, settings, ImageTrainSettings(batch_images=12), 1, 2)
    for batch in (found.batch(0, 0), found.held_out()[0]):
        for (pixels,) in batch.inputs:
            assert pixels.is_contiguous(memory_format=torch.channels_last)


def test_a_palette_is_resized_as_its_colours_are(tmp_path):
    """Pillow resizes a palette's numbers to the nearest one, without values between."""
    for mode in ("RGB", "P"):
        write(tmp_path / mode, "train", 10, mode=mode)
    pixels = []
    for mode in ("RGB", "P"):
        settings = ImageSettings(source=str(tmp_path / mode), size=SIZE // 2, fit="resize")
        data = prepare_images(settings, 3, 2, tmp_path / "cache", print)
        pixels.append(data.pixels("train", range(8), settings))
    assert torch.equal(*pixels)


def test_hidden_and_other_files_are_ignored_and_named(tmp_path):
    own = tmp_path / "own"
    write(own, "train", 24)
    before = folder_of_images(ImageSettings(source=str(own), size=SIZE), tmp_path)
    for name in ("train/ant/.ipynb_checkpoints/01-checkpoint.png", "train/bee/._1.png"):
        (own / name).parent.mkdir(exist_ok=True)
        shutil.copy(own / "train/ant/00.png", own / name)
    assert folder_of_images(ImageSettings(source=str(own), size=SIZE), tmp_path) == before
    shutil.copy(own / "train/ant/00.png", own / "train/00.png")
    (own / "labels.csv").write_text("")
    log = []
    data = prepared(own, tmp_path / "cache", log=log.append)
    assert data.info.counts == {"train": 18, "test": 6}
    write(own, "train", 25)
    assert folder_of_images(ImageSettings(source=str(own), size=SIZE), tmp_path) != before
    assert log[:2] == [
        f"ignored in {own}: 2 hidden files and folders (train/ant/.ipynb_checkpoints, train/bee/._1.png)",
        f"ignored in {own}: 2 files in no class of train (labels.csv, train/00.png)",
    ]


def test_names_that_are_not_utf8_and_two_forms_of_one_name_are_read(tmp_path):
    """A Mac writes decomposed names; latin-1 ones come from old archives."""
    latin1 = os.fsdecode(b"\xe9t\xe9")
    names = ("ant", unicodedata.normalize("NFC", "château"), latin1)  # classes 1, 2 and 0
    write(tmp_path / "own", "train", 12, classes=names)
    write(tmp_path / "own", "test", 3, classes=("ant", unicodedata.normalize("NFD", "château"), latin1))
    shutil.copy(tmp_path / "own/train/ant/00.png", tmp_path / "own/train" / f"{latin1}.png")
    log = []
    data = prepared(tmp_path / "own", tmp_path / "cache", classes=3, log=log.append)
    assert data.labels("train", range(12)).tolist() == [1] * 4 + [2] * 4 + [0] * 4
    assert data.labels("test", range(3)).tolist() == [1, 2, 0]
    assert "files in no class of train or test (train/\\xe9t\\xe9.png)" in log[0]


def cut(folder, kind, size=(64, 64)):
    """Writes an image in a class, without its last bytes."""
    path = folder / f"train/ant/x.{kind}"
    Image.effect_noise(size, 80).save(path)
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own: (own / "train/cow").mkdir(), "train/cow has no images to train on, because the"),
        (lambda own: write(own, "train", 1, classes=("cow",)), "train/cow has no images to train on, because the"),
        (lambda own: write(own, "test", 2, classes=("cat",)), "test has the class cat, which .*train does not have"),
        (lambda own: (own / "test/ant").mkdir(parents=True), "own has no test images; add some"),
        (lambda own: (own / "train/ant/x.png").write_text("no"), "train/ant/x.png is no image that can be read"),
        (lambda own: cut(own, "jpg"), r"train/ant/x\.jpg is no image that can be read \(image file is truncated"),
        (lambda own: cut(own, "gif"), r"train/ant/x\.gif is no image that can be read"),
        (lambda own: Image.new("I;16", (8, 8)).save(own / "train/ant/z.png"), r"z\.png is of mode I;16, more than 8"),
    ],
    ids=["empty", "one image", "unknown", "no test", "damaged", "jpeg", "gif", "deep"],
)
def test_a_wrong_folder_is_named(tmp_path, change, message):
    own = tmp_path / "own"
    write(own, "train", 10)
    change(own)
    with pytest.raises(DataError, match=message):
        prepared(own, tmp_path / "cache")
    assert not folder_of_images(ImageSettings(source=str(own), size=SIZE), tmp_path / "cache").exists()


def test_an_image_of_another_size_or_a_folder_that_is_gone_is_named(tmp_path):
    write(tmp_path / "own", "train", 10)
    Image.new("L", (9, 8)).save(tmp_path / "own/train/bee/y.png")
    with pytest.raises(DataError, match=r"train/bee/y\.png is 8 x 9 pixels, and 0 others are not 8 x 8; set"):
        prepared(tmp_path / "own", tmp_path / "cache")
    with pytest.raises(DataError, match=r"there is no image set '.*/gone'"):
        prepared(tmp_path / "gone", tmp_path)
