"""Image runs from the command line: training, resuming with another K, and init_from another run."""

import json

import pytest
from safetensors.numpy import load_file

from suite.training.metrics import read_steps
from suite.training.trace import read_traces
from tests.launch.command_line import gpipe_here, refusal
from tests.suite.data.images.pictures import write_folder

SMALL = (
    "images.size=8 images.crop=none images.flip=false model.filters=8 model.classes=4 train.batch_images=16 "
    "train.checkpoint_every=8 train.threads=1 pipeline.micro_batches=3 optimizer.warmup_steps=4 tracking.wandb=disabled"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the folder of a run of 16 steps over 2 stages, its images' folder, and what was printed."""
    folder = tmp_path_factory.mktemp("images")
    pictures = write_folder(folder / "pictures", train=160, test=40)
    settings = f"{SMALL} images.source={pictures} train.steps=16 pipeline.stages=2"
    printed = gpipe_here(folder, "experiment", "amoebanet_fashion", "--launcher", "local", "--set", settings)
    (run,) = folder.glob("runs/amoebanet_fashion/*")
    return folder, run, pictures, printed


def record(run):
    return json.loads((run / "record.json").read_text())


def weights(run, step):
    return [load_file(path) for path in sorted((run / "checkpoints" / f"{step:08d}").glob("*.safetensors"))]


def test_it_learns_and_reports_its_scores(trained):
    _, run, pictures, printed = trained
    found = record(run)
    assert found["counts"] == {"train": 160, "test": 40}
    assert found["images"] == 16 * 16
    assert found["data"] == str(pictures)
    assert found["baseline_accuracy"] == 0.25
    assert found["loss_last"] < found["loss_first"]
    assert f"test accuracy: {found['valid_accuracy']:.2%}; baseline, always the most frequent class: 25.00%" in printed
    assert "images/s" in printed
    assert all(0 <= line["train/accuracy"] <= 1 for line in read_steps(run / "metrics.jsonl"))
    moved = weights(run, 16)[0]["value/norm.running_mean"]
    assert abs(moved).max() > 0


def test_every_step_has_all_metrics_and_traced_steps_the_bubble(trained):
    _, run, _, printed = trained
    lines = read_steps(run / "metrics.jsonl")
    names = {
        "step", "train/loss", "train/accuracy", "train/grad_norm", "train/lr", "train/applied", "train/images",
        "throughput/step_s", "throughput/images_per_s", "throughput/images_per_s_per_device",
        "throughput/tflops_per_device", "throughput/mfu", "throughput/hfu", "memory/peak_gib",
    }  # fmt: skip
    assert all(set(line) == names | ({"pipeline/bubble"} if line["step"] in range(3, 8) else set()) for line in lines)
    found = record(run)
    for line in lines:
        assert line["throughput/images_per_s_per_device"] == line["throughput/images_per_s"] / 2
        flops = 1e12 * line["throughput/tflops_per_device"]
        assert line["throughput/mfu"] == pytest.approx(flops / found["peak_flops_per_s"])
        assert 0 < line["throughput/mfu"] <= line["throughput/hfu"] < 1
        assert 0 < line.get("pipeline/bubble", 0.5) < 1
    assert found["peak_source"] == "measured"
    assert max(line["memory/peak_gib"] for line in lines) <= found["peak_memory_bytes"] / 2**30
    assert f"MFU {found['mfu']:.1%}" in printed
    bubbles = {trace.step + 1: trace.timeline.bubble for trace in read_traces(run / "trace")}
    assert bubbles == pytest.approx(
        {line["step"]: line["pipeline/bubble"] for line in lines if line["step"] in bubbles}, abs=0.1
    )


@pytest.mark.slow
def test_the_same_run_at_another_k_has_the_same_bits(trained, tmp_path):
    folder, run, pictures, _ = trained
    (tmp_path / ".cache").symlink_to(folder / ".cache")  # the same pictures, and layers measured already
    settings = f"{SMALL} images.source={pictures} train.steps=16 pipeline.stages=3"
    gpipe_here(tmp_path, "experiment", "amoebanet_fashion", "--launcher", "local", "--set", settings)
    (other,) = tmp_path.glob("runs/amoebanet_fashion/*")
    for one, two in zip(weights(run, 16), weights(other, 16), strict=True):
        assert one.keys() == two.keys()
        assert all((one[name] == two[name]).all() for name in one)
    assert record(other)["valid_accuracy"] == record(run)["valid_accuracy"]


def test_a_run_starts_with_another_runs_weights_except_for_the_softmax(trained):
    folder, run, pictures, _ = trained
    settings = f"{SMALL} images.source={pictures} train.steps=1 pipeline.stages=2 optimizer.learning_rate=1e-12"
    before = {path.name for path in folder.glob("runs/amoebanet_fashion/*")}
    start = f"train.init_from={run}"
    gpipe_here(folder, "experiment", "amoebanet_fashion", "--launcher", "local", "--set", f"{settings} {start}")
    (new,) = [path for path in folder.glob("runs/amoebanet_fashion/*") if path.name not in before]
    old = weights(run, max(int(path.name) for path in (run / "checkpoints").glob("0*")))
    found = weights(new, 1)
    kernel = "value/scores.weight"
    assert found[0]["value/convolution.weight"] == pytest.approx(old[0]["value/convolution.weight"], abs=1e-6)
    assert abs(found[-1][kernel] - old[-1][kernel]).max() > 1e-3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("images.source=fashoin", "there is no image set 'fashoin'; did you mean fashion"),
        ("model.channels=3 images.source={pictures}", "its images have 1 channels, model.channels is 3"),
        ("model.classes=3 images.source={pictures}", "outside 0 to 2; set model.classes=4"),
        ("images.size=9 images.source={pictures}", "is 8 x 8 pixels, and 159 others are not 9 x 9"),
        ("images.source=/nowhere", "there is no image set '/nowhere'"),
        ("images.source={pictures} train.init_from=/nowhere", "no run '/nowhere'"),
        (
            "images.source={pictures} train.init_from={run} model.filters=12",
            "has a different model: filters is 8 there and 12 here; make them equal",
        ),
    ],
)
def test_invalid_settings_are_reported_before_the_first_step(trained, tmp_path, settings, message):
    _, run, pictures, _ = trained
    asked = f"{SMALL} {settings.format(pictures=pictures, run=run)}"
    given = {pair.partition("=")[0]: pair for pair in asked.split()}
    arguments = ["experiment", "amoebanet_fashion", "--launcher", "local", "--set", " ".join(given.values())]
    assert message in refusal(*arguments, folder=tmp_path)
