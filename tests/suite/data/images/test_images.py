"""Images: read exactly, refused with every fault before the first step, drawn alike however they are dealt out."""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from suite.data.images import sets
from suite.data.images.batches import ImageBatches, cutout, random_shift
from suite.data.images.prepare import folder_of_images, prepare_images
from suite.data.images.sets import read_folder
from suite.data.images.transforms import ImageData, random_resized_crop, resize_and_center_crop
from suite.data.packages import UnreachableError
from suite.errors import DataError
from suite.settings import ImageSettings, ImageTrainSettings
from tests.suite.data.batches import assert_parts, joined
from tests.suite.data.images.pictures import SIZE, images, write_folder, write_idx


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def data(folder, cache) -> ImageData:
    return prepare_images(settings(folder), 1, 4, cache, lambda text: None)


def settings(folder, **more):
    return ImageSettings(source=str(folder), size=SIZE, **more)


def batches(data, folder, replicas=1, micro_batches=4, seed=0, batch=12, **shown):
    train = ImageTrainSettings(batch_images=batch, seed=seed)
    return ImageBatches(data, settings(folder, **shown), train, replicas, micro_batches)


def test_a_prepared_set_gives_back_every_pixel_and_label(data, folder):
    pixels, labels = images(64, 0)
    rows = [0, 5, 63, 17]
    assert data.pixels("train", rows, settings(folder)).squeeze(1).numpy().tolist() == pixels[rows].tolist()
    assert data.labels("train", rows).tolist() == labels[rows].tolist()
    info = data.info
    assert (info.channels, info.classes, info.counts) == (1, 4, {"train": 64, "test": 20})
    assert data.classes == ["0", "1", "2", "3"]
    assert info.mean[0] == pytest.approx(pixels.mean() / 255)
    assert info.deviation[0] == pytest.approx(pixels.std() / 255)
    standard = data.standardised(data.pixels("train", range(64), settings(folder)))
    assert float(standard.mean()) == pytest.approx(0, abs=1e-5)
    assert float(standard.std(unbiased=False)) == pytest.approx(1, abs=1e-5)


def test_it_is_built_once_and_all_images_are_decoded_once(data, folder, cache, monkeypatch):
    for function in ("read_images", "decode_images"):
        monkeypatch.setattr(f"suite.data.images.prepare.{function}", lambda *_: pytest.fail("read again"))
    assert prepare_images(settings(folder, flip=True), 1, 4, cache, print).info == data.info


def test_every_fault_is_told_before_the_first_step(folder, cache):
    with pytest.raises(DataError) as caught:
        prepare_images(settings(folder).model_copy(update={"size": 9}), 3, 3, cache, lambda text: None)
    for fault in (
        "its images have 1 channels, model.channels is 3",
        "train image 3 has the label 3, and 15 others have a label outside 0 to 2; set model.classes=4",
        "test image 3 has the label 3, and 4 others",
        "train image 0 is 8 x 8 pixels, and 63 others are not 9 x 9; set images.size, or images.fit=resize",
        "test image 0 is 8 x 8 pixels",
    ):
        assert fault in str(caught.value)


def test_other_sizes_are_made_right_where_that_is_asked_for(data, folder):
    large = settings(folder, fit="resize").model_copy(update={"size": 12})
    assert data.pixels("test", [0, 1], large).shape == (2, 1, 12, 12)
    wide = Image.new("L", (30, 10))
    wide.paste(255, (10, 0, 20, 10))
    assert np.asarray(resize_and_center_crop(wide, 5)).min() > 200  # the middle, all bright


@pytest.mark.parametrize(
    "harm", [lambda raw: raw[: len(raw) // 2], lambda raw: raw[:60] + b"\0\1\2" + raw[63:], lambda raw: b"no archive"]
)
def test_a_damaged_archive_is_named(tmp_path, harm):
    path = write_folder(tmp_path) / "train-images-idx3-ubyte.gz"
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(DataError, match=f"{path.name} is damaged"):
        read_folder(tmp_path)


def test_a_folder_without_images_is_named(tmp_path):
    with pytest.raises(DataError, match=r"has no images in train/<class>/; put it there$"):
        read_folder(tmp_path)
    folder = write_folder(tmp_path)
    (folder / "t10k-images-idx3-ubyte.gz").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"has no t10k-images-idx3-ubyte.gz; put it there$"):
        read_folder(folder)
    (tmp_path / "elsewhere").rename(folder / "t10k-images-idx3-ubyte.gz")
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", np.zeros(19, dtype=np.uint8))
    with pytest.raises(DataError, match=r"test has images of shape \(20, 8, 8\) and labels of shape \(19,\)"):
        read_folder(folder)
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", np.zeros((5, 4), dtype=np.uint8))
    with pytest.raises(DataError, match=r"labels of shape \(5, 4\)"):
        read_folder(folder)


def test_an_unknown_set_is_told_with_the_nearest(tmp_path):
    with pytest.raises(DataError, match="there is no image set 'fashoin'; did you mean fashion"):
        prepare_images(ImageSettings(source="fashoin"), 1, 10, tmp_path, print)


def test_where_debian_is_not_the_hub_is_asked_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sets, "_FASHION_FOLDER", sets._FASHION_FOLDER / "nowhere")
    monkeypatch.setenv("PATH", "")
    said: list[str] = []
    with pytest.raises(UnreachableError, match="zalando-datasets/fashion_mnist could not be read from the hub"):
        prepare_images(ImageSettings(), 1, 10, tmp_path, said.append)
    assert any("apt-get is not installed" in line and "using zalando" in line for line in said)


def colours(count, size, classes, secret=False):
    """A set as the hub has them: colour, named classes, of ImageNet's kind with labels that are no secret but the
    test's."""
    generator = np.random.default_rng(3)
    rows = {
        "img": [generator.integers(0, 255, (size, size, 3)).astype(np.uint8) for _ in range(count)],
        "fine_label": [-1 if secret else at % classes for at in range(count)],
        "coarse_label": [0] * count,
    }
    kinds = datasets.Features(
        img=datasets.Image(),
        fine_label=datasets.ClassLabel(num_classes=classes),
        coarse_label=datasets.ClassLabel(num_classes=2),
    )
    return datasets.Dataset.from_dict(rows, features=kinds)


ON_THE_HUB = ImageSettings(source="owner/name", size=6)


def test_a_set_on_the_hub_goes_the_same_way(tmp_path, monkeypatch):
    """The hub itself cannot be reached from a test; what it returns is real."""
    whole = datasets.DatasetDict(
        train=colours(30, 6, 5), test=colours(6, 6, 5, secret=True), validation=colours(10, 6, 5)
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda name: whole)
    data = prepare_images(ON_THE_HUB, 3, 5, tmp_path, lambda text: None)
    assert data.info.counts == {"train": 30, "test": 10}
    assert (data.info.image_column, data.info.label_column, data.info.channels) == ("img", "fine_label", 3)
    again = ImageData(folder_of_images(ON_THE_HUB, tmp_path))
    pixels = again.pixels("train", [7], ON_THE_HUB)
    assert pixels.permute(0, 2, 3, 1)[0].tolist() == np.asarray(whole["train"][7]["img"]).tolist()


def test_a_set_that_changed_on_the_hub_is_not_mixed_up(tmp_path, monkeypatch):
    whole = datasets.DatasetDict(train=colours(30, 6, 5), test=colours(6, 6, 5))
    monkeypatch.setattr(datasets, "load_dataset", lambda name: whole)
    prepare_images(ON_THE_HUB, 3, 5, tmp_path, lambda text: None)
    whole["train"] = colours(31, 6, 5)
    with pytest.raises(DataError, match=r"has changed since .* was prepared; delete that folder"):
        ImageData(folder_of_images(ON_THE_HUB, tmp_path))


def test_a_damaged_image_is_named(tmp_path, monkeypatch):
    table = colours(30, 6, 5).to_dict()
    kinds = colours(1, 6, 5).features
    table["img"][20] = {"bytes": table["img"][20]["bytes"][:40], "path": None}
    whole = datasets.DatasetDict(train=datasets.Dataset.from_dict(table, features=kinds), test=colours(6, 6, 5))
    monkeypatch.setattr(datasets, "load_dataset", lambda name: whole)
    with pytest.raises(DataError, match="train image 20 is damaged"):
        prepare_images(ON_THE_HUB, 3, 5, tmp_path, lambda text: None)


def test_the_same_images_however_they_are_dealt_out(data, folder):
    shown = {"flip": True, "crop": "random_shift", "cutout": 3}
    whole = joined(batches(data, folder, micro_batches=1, **shown).batch(7, 0))
    for replicas, micro_batches in ((1, 5), (2, 3), (4, 4)):
        dealt = batches(data, folder, replicas, micro_batches, **shown)
        shares = [dealt.batch(7, replica) for replica in range(replicas)]
        for found, wanted in zip(zip(*map(joined, shares), strict=True), whole, strict=True):
            assert torch.cat(found).equal(wanted)
        assert [share.offset for share in shares] == [sum(map(len, shares[:at])) for at in range(replicas)]
        assert {share.divisor for share in shares} == {12.0}


def test_held_out_images_are_evenly_spaced_and_as_they_are(data, folder):
    train = ImageTrainSettings(batch_images=12, test_images=17)
    found = ImageBatches(data, settings(folder, flip=True, cutout=3), train, 1, 5).held_out()
    assert len(found) == 2
    assert [batch.divisor for batch in found] == [12.0, 5.0]
    assert [len(batch) for batch in found] == [5, 5]
    train = ImageTrainSettings(batch_images=12, test_images=1000)
    assert sum(batch.divisor for batch in ImageBatches(data, settings(folder), train, 1, 5).held_out()) == 20  # all
    shown, labels = (torch.cat(parts) for parts in zip(*map(joined, found), strict=True))
    pixels, wanted = images(20, 1)
    rows = [*range(6), *range(7, 13), *range(14, 19)]  # of 20, without every seventh, which is too many by three
    assert rows == [at * 20 // 17 for at in range(17)]
    assert labels.tolist() == wanted[rows].tolist()
    assert shown.equal(data.standardised(torch.from_numpy(pixels[rows]).unsqueeze(1)))


def test_a_stage_gets_only_what_it_uses_and_the_last_one_reads_no_images(data, folder, monkeypatch):
    made = batches(data, folder, 2, flip=True)
    both, first = made.batch(1, 1), made.batch(1, 1, targets=False)
    monkeypatch.setattr(ImageData, "pixels", lambda *_: pytest.fail("read"))
    assert_parts(both, first, made.batch(1, 1, inputs=False))


def test_another_seed_has_other_rows_and_other_flips(data, folder):
    one, other = (batches(data, folder, seed=seed, flip=True) for seed in (0, 1))
    rows, own_rows = (joined(made.batch(0, 0)) for made in (one, other))
    assert not rows[1].equal(own_rows[1])
    flipped, own_flipped = (made._read(range(12), 0, slice(12))[0]() for made in (one, other))
    assert not flipped.equal(own_flipped)


def test_a_shift_moves_each_image_by_up_to_an_eighth_and_fills_with_grey():
    x = torch.arange(1.0, 65.0).view(1, 1, 8, 8)
    still, right = random_shift(x, torch.tensor([[0.5, 0.5]])), random_shift(x, torch.tensor([[0.0, 0.5]]))
    assert still.equal(x)
    assert right[..., 1:].equal(x[..., :-1])
    assert right[..., 0].eq(0).all()
    assert random_shift(x, torch.tensor([[1.0, 1.0]]))[..., :-1, :-1].equal(x[..., 1:, 1:])


def test_a_cutout_is_a_square_that_may_hang_over_the_edge():
    x = torch.ones(2, 3, 8, 8)
    cut = cutout(x, torch.tensor([[0.5, 0.25], [0.0, 0.99]]), 4)
    holes = (cut == 0).all(1)
    assert holes[0].nonzero().tolist() == [[y, x] for y in range(4) for x in range(2, 6)]
    assert holes[1].nonzero().tolist() == [[y, x] for y in range(5, 8) for x in range(2)]
    assert x.eq(1).all()


def test_a_part_is_as_large_as_its_chances_say():
    image = Image.new("L", (100, 80))
    for chances in ([0.0, 0.5, 0.3, 0.3], [1.0, 0.5, 0.5, 0.5], [0.5, 0.0, 1.0, 1.0], [0.7, 1.0, 0.0, 0.0]):
        assert random_resized_crop(image, chances, 16).size == (16, 16)
    bright = Image.new("L", (100, 100))
    bright.paste(255, (60, 60, 100, 100))
    corner = np.asarray(random_resized_crop(bright, [0.0, 0.5, 1.0, 1.0], 8))
    assert corner.min() == 255  # 8% of the area, in the lower right corner
