"""An experiment is consistent, refuses unknown settings, and survives its file exactly."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from experiments.base import overrides
from experiments.base.experiment import Experiment
from experiments.base.setting_faults import unreached
from experiments.planning.pipeline_settings import merged
from experiments.registry import TASKS, find, read_experiment_file
from experiments.translation.experiment import TranslationExperiment
from experiments.translation.runs import t12_400m
from models.loss import TranslationLoss
from models.transformer import TransformerShape
from suite.errors import SettingError, SuiteError
from suite.settings import OptimizerSettings, PipelineSettings, TextSettings, TrackingSettings, TrainSettings
from tests.experiments.stored import stored

REAL = st.floats(min_value=1e-300, max_value=1e300)
SHARE = st.floats(min_value=0, max_value=1, exclude_max=True)
COUNT = st.integers(min_value=1, max_value=500_000)
WHOLE = st.integers(min_value=1, max_value=10**12)


@st.composite
def records(draw: st.DrawFn) -> Experiment:
    """Any experiment that agrees with itself."""
    depth, vocabulary = draw(st.integers(1, 70)), draw(st.integers(300, 10**6))
    stages = draw(st.integers(1, 2 * depth + 3))
    cells = (*(1,) * (stages - 1), 2 * depth + 3 - stages + 1) if draw(st.booleans()) else None
    return TranslationExperiment(
        name=draw(st.text()),
        scale=draw(st.sampled_from(["paper", "laptop"])),
        model=TransformerShape(
            blocks_per_stack=depth,
            width=2 * draw(COUNT),
            feed_forward=draw(COUNT),
            heads=draw(COUNT),
            vocabulary=vocabulary,
            dropout=draw(SHARE),
            label_smoothing=draw(SHARE),
            logit_clip=draw(st.none() | REAL),
        ),
        text=TextSettings(corpus=draw(st.text()), vocabulary=vocabulary, temperature=draw(REAL)),
        pipeline=PipelineSettings(
            stages=stages, layers_per_cell=cells, remat=draw(st.sampled_from(["always", "never"]))
        ),
        optimizer=OptimizerSettings(learning_rate=draw(REAL), max_grad_norm=draw(st.none() | REAL), beta1=draw(SHARE)),
        train=TrainSettings(steps=draw(WHOLE), threads=draw(st.none() | WHOLE)),
        tracking=TrackingSettings(project=draw(st.text())),
        trace=draw(st.booleans()),
        shrunk=tuple(draw(st.lists(st.text(), max_size=3))),
    )


@settings(max_examples=60)
@given(records())
def test_the_toml_round_trip_is_exact(record: Experiment) -> None:
    assert stored(record) == record


def test_build_gives_layers_without_memory_and_the_loss() -> None:
    layers, loss = t12_400m().build()
    assert len(layers) == 15
    assert {parameter.device for layer in layers for parameter in layer.parameters()} == {torch.device("meta")}
    assert isinstance(loss, TranslationLoss)
    assert loss.label_smoothing == 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "not valid TOML"),
        (t12_400m().to_toml().replace("format = 5\n", ""), "another version of the suite.*format 1, this .* reads"),
        (
            'format = 5\nname = "x"',
            "task is None in the experiment's file; it must be one of translation, language_model",
        ),
        ('format = 5\nname = "x"\ntask = ["x"]', r"task is \['x'\] in the experiment's file; it must be one of"),
        ('format = 5\nname = "x"\ntask = "translation"', "missing"),
        (t12_400m().to_toml().replace("steps = 100000", 'steps = "many"'), "train.steps takes an integer.*'many'"),
        (
            t12_400m().to_toml().replace("heads = 16", "haeds = 16"),
            r"model.haeds is not a setting; did you mean model.heads\b",
        ),
        (t12_400m().to_toml() + "speed = 3\n", "text.speed is not a setting"),
        (t12_400m().to_toml().replace("[tracking]", "tracking = 3"), "tracking"),
    ],
)
def test_a_damaged_file_is_refused_with_its_fault(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text(text)
    with pytest.raises(SuiteError, match=message):
        read_experiment_file(file)


def changed(**sections: Any) -> Experiment:
    return TranslationExperiment(**{**dict(t12_400m()), **sections})


def test_wrong_types_names_and_contradictions_are_also_refused_in_code() -> None:
    shape: Any = t12_400m().model
    with pytest.raises(ValidationError, match="heads"):
        changed(model=replace(shape, heads=2.5))
    with pytest.raises(ValidationError, match="speed"):
        changed(speed=3)
    with pytest.raises(SettingError, match=r"model\.vocabulary is 64000 and text\.vocabulary 500"):
        changed(text=TextSettings(vocabulary=500))
    with pytest.raises(ValidationError, match="frozen"):
        t12_400m().name = "other"  # type: ignore[misc]


def test_settings_reach_their_fields_with_their_types() -> None:
    record = t12_400m().with_settings(
        "train.steps=50 pipeline.stages=4 pipeline.layers_per_cell=4,4,4,3 optimizer.learning_rate=1e-3 "
        "text.corpus=django text.vocabulary=5000 pipeline.remat=always train.threads=2 model.logit_clip=none trace=true"
    )
    assert record.trace
    assert not t12_400m().trace
    assert (record.train.steps, record.pipeline.stages, record.pipeline.layers_per_cell) == (50, 4, (4, 4, 4, 3))
    assert (record.optimizer.learning_rate, record.text.corpus, record.pipeline.remat) == (1e-3, "django", "always")
    assert record.text.vocabulary == record.model.vocabulary == 5000
    assert (record.train.threads, record.model.logit_clip) == (2, None)
    assert t12_400m().with_settings(["train.steps=50", "train.seed=3"]).train.seed == 3
    assert t12_400m().with_settings("") == t12_400m()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.steps=abc", "train.steps takes an integer; it was given 'abc'"),
        ("text.vocabulary=-5", "^text.vocabulary takes an integer, 300 or more; it was given -5$"),
        ("train.steps=0", "train.steps takes an integer, 1 or more; it was given 0$"),
        ("pipeline.micro_batches=automatic", "pipeline.micro_batches takes auto or an integer.*given 'automatic'"),
        ("pipeline.micro_batches=-1", "pipeline.micro_batches takes auto or an integer, 0 or more; it was given -1$"),
        ("optimizer.beta1=1.5", "optimizer.beta1 takes a number, below 1.0; it was given 1.5$"),
        ("train.seed=9223372036854775808", "train.seed takes an integer, below 9223372036854775808; it was given"),
        ("train.steps=1.5", "train.steps takes an integer; it was given '1.5'"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate takes a number"),
        ("optimizer.name=sdg", "optimizer.name takes one of adamw, adafactor, rmsprop, sgd; it was given 'sdg'"),
        ("train.patience=3", "train.patience=3 counts validations, and train.validate_every is none"),
        ("optimizer.max_grad_norm=x", "optimizer.max_grad_norm takes a number, or none"),
        ("pipeline.layers_per_cell=a,b", "pipeline.layers_per_cell takes integers such as 10,12, or none"),
        ("model.width=63", "model.width takes an integer, a multiple of 2; it was given 63$"),
        ("model.heads=1000001", "model.heads takes an integer, 1000000 or less; it was given 1000001$"),
        ("model.vocabulary=5000", "model.vocabulary is 5000 and text.vocabulary 64000; set only text.vocabulary"),
        ("pipeline.stages=16", "pipeline.stages is 16, the model has 15 layers; use 1 to 15 stages$"),
        ("pipeline.stages=2 pipeline.layers_per_cell=5,5,5", "has 3 cells, pipeline.stages is 2; make them equal$"),
        ("pipeline.stages=2 pipeline.layers_per_cell=5,5", "hold 10 layers, the model has 15: 5 left out;"),
        ("pipeline.stages=2 pipeline.layers_per_cell=15,0", "none may be empty"),
        ("train.stepz=5", "train.stepz is not a setting; did you mean train.steps"),
        ("learning-rate=1", r"did you mean optimizer.learning_rate\?$"),
        ("train.learning_rate=1", r"did you mean optimizer.learning_rate\?$"),
        ("batch_size=8", r"did you mean train.batch_tokens\?$"),
        ("NUM_LAYERS=3", r"did you mean model.blocks_per_stack\?$"),
        ("optimizer.betas=0.9,0.95", r"did you mean optimizer.beta1, optimizer.beta2\?$"),
        ("pipeline.schedule=gpipe", r"given 'gpipe'; did you mean fill_drain\?$"),
        ("pipeline.schedule=1F1B", r"given '1F1B'; did you mean 1f1b\?$"),
        ("train.steps=1.25e1", "train.steps takes an integer; it was given '1.25e1'"),
        ("train.steps=" + "9" * 5000, r"train.steps takes an integer; it was given '9{99}\.\.\.: "),
        ("x" * 5000 + "=1", r"x{100}\.\.\. is not a setting"),
        ("train=5", "train is not a setting"),
        ("scale=paper", "scale is not a setting"),
        ("trace=sometimes", "trace takes true or false; it was given 'sometimes'"),
        ("pipeline.stages=20 pipeline.layers_per_cell=9,9", "has 15 layers.*has 2 cells.*hold 18 layers"),
        ("train.steps", "has no '='"),
        ("train.checkpoint_dir='/my disk", "No closing quotation.*a value with blanks stands in quotes"),
        ("train.steps=5 train.steps=6", "train.steps is set twice, to 5 and to 6"),
        ("pipeline=2", "pipeline takes only auto, and only in the "),
    ],
)
def test_a_bad_setting_is_one_sentence_naming_it(setting: str, message: str) -> None:
    with pytest.raises(SettingError, match=message) as fault:
        t12_400m().with_settings(setting)
    assert "\n" not in str(fault.value)


VALUES = (
    *["", "0", "-1", "1.5", "1e400", "nan", "-inf", "9" * 30, "9" * 5000, "9223372036854775808", "0x10", "1,000"],
    *["none", "auto", "true", "gpipe", "a,b", ",", "[]", "\u0663", "\u00bd", "\x00", "\x1b[31m", "\ud800", "x" * 5000],
    *["/", "http://[", "/tmp/x\x00y.csv", "~nobody/x.csv", "no.csv", "gl:\u0663", "23-20", "1-99999999999999999999"],
    *["%s", "{0}", "a=b", "'", '"', "\\"],
)


@pytest.mark.parametrize("name", ["t12_400m", "transformer_12", "amoebanet_fashion"])
def test_any_setting_works_or_is_refused_in_one_sentence_that_can_be_printed(name: str) -> None:
    experiment, chance = find(name), random.Random(name)
    paths = [
        *overrides.paths(type(experiment)),
        *(word for words in overrides.OTHER_NAMES.values() for word in words.split()),
    ]
    for _ in range(150):
        quote = chance.choice(["", "", "", "'", '"', "\\"])
        text = f"{chance.choice(paths)}{chance.choice(['='] * 9 + [''])}{quote}{chance.choice(VALUES)}{quote}"
        try:
            changed = experiment.with_settings(text)
            changed.build()
            assert stored(changed) == changed, ascii(text)
        except SettingError as error:
            said = str(error)
        else:
            said = ""
        assert len(said.encode()) < 2500, ascii(text)


def test_integers_may_be_written_as_powers_of_ten() -> None:
    record = t12_400m().with_settings("train.steps=1e3 train.threads=2.5E+1 pipeline.layers_per_cell=1.5e1")
    assert (record.train.steps, record.train.threads, record.pipeline.layers_per_cell) == (1000, 25, (15,))
    assert t12_400m().with_settings("pipeline.micro_batches=1e1").pipeline.micro_batches == 10


def test_names_of_other_libraries_lead_to_settings_that_exist() -> None:
    known = {path for record in TASKS.values() for path in overrides.paths(record)}
    kinds = [kind for record in TASKS.values() for kind in overrides.paths(record).values()]
    known |= {value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)}
    assert {path for paths in overrides.OTHER_NAMES for path in paths.split()} <= known


@pytest.mark.parametrize("quote", "'\"")
def test_a_value_with_spaces_needs_quotes(quote: str) -> None:
    experiment = t12_400m().with_settings(f"train.steps=5  train.checkpoint_dir={quote}/my disk/runs{quote}")
    assert (experiment.train.steps, experiment.train.checkpoint_dir) == (5, "/my disk/runs")
    printed = merged("train.steps=5", f"train.checkpoint_dir={quote}/my disk/runs{quote}")  # as a plan's remedy has it
    assert t12_400m().with_settings(printed) == experiment


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("train.steps=20 train.validate_every=30 train.patience=3", "validate_every=30 is longer than the run of 20 "),
        ("train.steps=100 train.validate_every=20 train.patience=4", "use train.patience=3 or less"),
        ("train.steps=100 train.validate_every=50 train.patience=1", "use a smaller train.validate_every"),
        (
            "train.steps=50 optimizer.lr_decay=wsd optimizer.warmup_steps=40 optimizer.lr_decay_steps=20",
            "warmup_steps=40, lr_stable_steps=0 and lr_decay_steps=20 are 60 steps, and train.steps=50 ends before",
        ),
    ],
)
def test_what_a_run_is_too_short_for_is_said_and_not_refused(settings, words):
    run = t12_400m().with_settings(settings)
    (said,) = unreached(run.train, run.optimizer)
    assert words in said
    longer = t12_400m().with_settings("train.steps=100 train.validate_every=20 train.patience=3")
    assert not list(unreached(longer.train, longer.optimizer))


def test_a_mini_batch_larger_than_the_data_is_said():
    run = find(f"{Path(__file__).parents[1] / 'custom/test_param_groups.py'}:spec")
    assert not list(run.remarks())
    (said,) = run.with_settings("train.batch_rows=100000").remarks()
    assert re.fullmatch(r"train.batch_rows=100,000 of \d+ rows: a step takes rows several times; use \d+", said)


def test_a_record_is_of_a_finished_run_after_all_steps_or_when_patience_ran_out():
    run = t12_400m().with_settings("train.steps=100 train.validate_every=10 train.patience=3")
    stopped = {"steps": 60, "stopped_early": "stopped early ...", "validations_without_improvement": 3}
    assert run.is_finished(stopped)
    assert run.with_settings("train.patience=2").is_finished(stopped)
    assert not run.with_settings("train.patience=4").is_finished(stopped)
    assert not run.with_settings("train.patience=none").is_finished(stopped)
    assert run.is_finished({"steps": 100, "stopped_early": False})
    assert not run.is_finished({"steps": 60})
