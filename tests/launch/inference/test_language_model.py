"""A language model trained on own text: the same bits at K = 1 and 2, its scores, its continuations, its export."""

import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

import suite
from experiments.base.cluster import Cluster
from experiments.registry import find
from launch.backends.processes import LocalLauncher
from launch.inference.decoding_methods import Request
from launch.inference.generate import continuations, find_language_model_run
from launch.inference.model_text import load_data
from launch.runs.store import find_run, named_run
from launch.train.summary import describe_scores
from suite.data.documents.batches import RowBatches
from suite.data.documents.prepare import folder_of_documents, prepare_documents
from suite.data.documents.tokenizer import END_ID
from suite.data.documents.tokens import TokenData
from suite.data.tokens import encode_all
from suite.errors import DataError
from suite.evaluation.ngram import ngram_nll
from tests.launch.command_line import call, refusal
from tests.launch.records import write_records
from tests.suite.data.documents.writing import write_folder

QUIET = Console(quiet=True)
STEPS = 12
SETTINGS = (
    "text.corpus=text text.vocabulary=300 text.length=24 model.dropout=0.1 model.width=16 model.feed_forward=32 "
    f"train.steps={STEPS} train.batch_sequences=8 train.checkpoint_every=6 train.threads=1 tracking.wandb=disabled "
    "train.valid_sequences=20 pipeline.micro_batches=3 pipeline.replicas=1 pipeline.remat=except_last "
    "optimizer.warmup_steps=4 "
)
PROMPTS = ["The stage sends", "A layer", "One stage <|endoftext|>", "The layer waits", "x"]


def train(name, settings, cells, stops=(STEPS,)):
    experiment = find("transformer_3").at_laptop_scale(Cluster(2, 2**33, "cpu")).with_settings(SETTINGS + settings)
    prepare_documents(experiment.text, Path(".cache"), lambda _: None)
    run = named_run("transformer_3", name)
    for stop in stops:
        each = experiment.with_settings(f"train.steps={stop} optimizer.lr_decay_steps=8")
        resume = stop != stops[0]
        _, attempt = write_records(run, each, cells, folder_of_documents(each.text, Path(".cache")).resolve(), resume)
        LocalLauncher().run(attempt, each, SimpleNamespace(should_stop=False))
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with one run at K = 1, and one at K = 2 that is resumed."""
    folder = tmp_path_factory.mktemp("language")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_folder(folder / "text")
        train("one", "pipeline.stages=1", (5,))
        train("two", "pipeline.stages=2", (2, 3), stops=(6, STEPS))
        yield folder


@pytest.fixture(autouse=True)
def _in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def opened(name="two"):
    run = find_run(name)
    experiment = find_language_model_run(run)
    return run, experiment, load_data(run, experiment, TokenData, QUIET)


@torch.inference_mode()
def logits_of(model, ids):
    return model(torch.tensor([ids]))[0]


def greedy(model, source, count):
    """Continues by recomputing the whole prefix for each token."""
    ids = list(source)
    while len(ids) < len(source) + count:
        token = int(logits_of(model, ids)[-1].argmax())
        if token == END_ID:
            break
        ids.append(token)
    return ids[len(source) :]


def test_a_run_resumed_at_two_stages_has_the_bits_of_one_at_one_stage():
    one, two = (json.loads(find_run(name).record.read_text()) for name in ("one", "two"))
    assert (one["K"], two["K"], two["steps"]) == (1, 2, STEPS)
    assert one["loss_last"] < one["loss_first"] - 0.2
    for key in ("loss_first", "loss_last", "valid_nll", "baselines", "counts"):
        assert one[key] == two[key]


def test_the_record_has_the_scores_beside_those_of_n_grams_on_the_same_rows():
    run, experiment, data = opened()
    record = json.loads(run.record.read_text())
    model, nll, count, rows = suite.load(run.path), 0.0, 0, []
    for batch in RowBatches(data, experiment.text, experiment.train, 1, 3).held_out():
        for (ids,), (labels,) in zip(batch.inputs, batch.targets, strict=True):
            for own, following in zip(ids.tolist(), labels.tolist(), strict=True):
                log_p = logits_of(model, own).double().log_softmax(-1)
                nll -= float(log_p[range(len(own)), following].sum())
                count += len(own)
                rows.append([own[0], *following])
    text = "".join(data.tokenizer.decode(row[1:], skip_special_tokens=True) for row in rows)
    assert record["valid_nll"] == pytest.approx(nll / count, rel=1e-5)
    assert record["valid_perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-5)
    assert record["valid_bits_per_byte"] == pytest.approx(nll / math.log(2) / len(text.encode()), rel=1e-5)
    trigram, bigram, unigram = ngram_nll(data.train, np.array(rows), 300, [3, 2, 1])
    assert record["baselines"] == pytest.approx({"trigram": trigram, "bigram": bigram, "unigram": unigram})
    assert record["baseline_nll"] == record["baselines"]["trigram"]
    assert record["counts"] == data.counts
    lines = describe_scores(record).splitlines()
    assert f"{nll / count:.3f} nats per token (perplexity" in lines[0]
    assert [line.split(":")[0].strip() for line in lines] == ["validation", "trigram", "bigram", "unigram"]


def test_continuations_are_those_of_the_whole_prefix_at_every_k():
    run, experiment, data = opened()
    model = suite.load(run.path)
    expected = []
    for prompt in PROMPTS:
        (ids,) = encode_all(data.tokenizer, [prompt])
        expected.append(data.tokenizer.decode(ids + greedy(model, [END_ID, *ids], 24 - len(ids))))
    for stages in (1, 2):
        assert continuations(run, experiment, data, PROMPTS, Request(), stages, QUIET)[0] == expected
    drawn = [
        continuations(run, experiment, data, prompts, Request(9, 1.5, 20, seed), stages, QUIET)[0]
        for prompts, seed, stages in ((PROMPTS, 1, 1), (PROMPTS, 1, 2), (PROMPTS[:2], 1, 1), (PROMPTS, 2, 1))
    ]
    assert drawn[0] == drawn[1] != drawn[3]
    assert drawn[2] == drawn[0][:2]
    assert drawn[0] != expected


def test_a_prompt_that_is_too_long_is_named_and_the_others_are_continued(monkeypatch):
    lines = f"{PROMPTS[0]}\n\n{'stage ' * 30}\n{PROMPTS[1]}\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(lines.encode())))
    code, out, errors = call("generate", "one", "")
    assert code == 0
    assert "line 3 is skipped: the prompt has " in errors
    assert all(prompt in out for prompt in PROMPTS[:2])


def test_a_run_starts_from_no_run_of_another_vocabulary(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(Path("text"), count=30)
    with pytest.raises(DataError, match="was trained with a different vocabulary"):
        train("other", f"pipeline.stages=1 train.init_from={folder}/runs/transformer_3/one ", (5,), stops=(1,))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["generate", "one", ""], ["the prompt is empty", "standard input"]),
        (["generate", "one", "stage " * 30], ["tokens", "rows of 24", "so 0 can follow it; shorten the prompt"]),
        (["generate", "one", "stage", "--temperature=-1", "--top-k=0"], ["--temperature is -1.0", "--top-k is 0"]),
        (["generate", "one", "stage", "--top-k", "3"], ["--top-k is 3 and --temperature 0"]),
        (["generate", "one", "stage", "--tokens", "500"], ["set --tokens="]),
        (["score", "one"], ["is no translation model"]),
        (["resume", "one", "--set", "pipeline.stages=6"], ["pipeline.stages is 6, the model has 5 layers"]),
        (["resume", "one", "--set", "text.length=48"], ["a resumed run cannot change model and text"]),
        (["resume", "one", "--set", "train.seed=7"], ["a resumed run cannot change train.seed; start a new run"]),
        (["resume", "one", "--set", "train.steps=2"], ["and train.steps is 2; to train longer: ", "train.steps="]),
        (
            ["resume", "one", "--set", "train.steps=900 train.profile_steps=2-3"],
            ["train.profile_steps is 2-3, and the run resumes after step"],
        ),
    ],
)
def test_what_generate_score_and_resume_refuse_is_one_line(arguments, parts, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(b"\n")))
    printed = refusal(*arguments)
    assert all(part in printed for part in parts), printed
