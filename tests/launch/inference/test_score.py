"""Scores, translations and exports of a run, and their errors."""

import io
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

import suite
from experiments.registry import find
from experiments.report.table import readable
from experiments.translation.score_settings import ScoreSettings
from launch.inference import decode as decoding
from launch.inference import held_out_samples
from launch.inference.decode import find_text_run
from launch.inference.decoding_methods import BeamSearch
from launch.inference.export import export
from launch.inference.held_out_samples import described, translate_held_out
from launch.inference.model_text import load_data, source_of
from launch.inference.score import Direction, _print_scores, directions, score_run, scored_rows
from launch.inference.translate import translate
from launch.runs.store import RunFolder, find_run, named_run
from launch.watching.translation_samples import score_section
from suite.data.text.prepare import folder_of
from suite.data.text.text import TextData
from suite.data.text.tokenizer import BEGIN_ID, END_ID
from suite.decoding.beam import SIZE
from suite.decoding.decode import Decoder
from suite.errors import SettingError
from suite.evaluation.scores import one_line, score
from suite.training.wandb_run import Identity
from tests.launch.command_line import ROOT, call, refusal
from tests.launch.tracking.wandb_parts import parts

QUIET = Console(quiet=True)
SETTINGS = ScoreSettings(beam=2, languages=("de", "zh-tw"), max_pairs=12, stages=2)

pytestmark = pytest.mark.usefixtures("in_folder")


@pytest.fixture(scope="module")
def scored(folder_of_runs):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder_of_runs)
        Identity("p", "made", None, (), "abcd").write(find_run("made").path)  # as if it had been trained with wandb
        return score_run(find_run("made"), SETTINGS, QUIET)


def translated(run, sources, console=QUIET, beam=SIZE):
    """Translates sources, each ``<2xx> ... </s>``, on one stage."""
    return decoding.decode(run, sources, BeamSearch(beam, find_text_run(run).text.max_length), 1, console)


def texts(kind):
    folder = find_run("made").path / "scores"
    return {path.name: path.read_text(encoding="utf-8").splitlines() for path in sorted(folder.glob(f"*.{kind}"))}


def test_scores_are_in_the_runs_wandb_run(scored):
    run = find_run("made").path
    (part,) = parts(run)
    assert part.run["run_id"] == "abcd"
    (row,) = part.history
    assert row["step"] == 7
    for measure in ("bleu", "chrf"):
        assert row[f"scores/{measure}"] == pytest.approx(scored["macro"][measure]["all"])
    (languages,) = run.glob("wandb/offline-run-*/files/media/table/scores/languages_*.table.json")
    table = json.loads(languages.read_text())
    rows = [dict(zip(table["columns"], values, strict=True)) for values in table["data"]]
    assert [(row["language"], row["direction"]) for row in rows] == [
        ("de", "en-de"), ("de", "de-en"), ("zh_Hant", "en-zh_Hant"), ("zh_Hant", "zh_Hant-en"),
    ]  # fmt: skip
    for row in rows:
        one = scored["directions"][row["direction"]]
        assert (row["BLEU"], row["chrF"], row["pairs"]) == (one["bleu"], one["chrf"], 12)
        assert row["BLEU signature"] == scored["signatures"]["bleu"]
        assert row["third"] == scored["thirds"][row["language"]]
    assert sorted(name.partition("-scores")[0] for name in part.artifacts) == ["run-abcd", "run-abcd"]


def test_the_files_of_scores(scored):
    assert json.loads((find_run("made").path / "scores.json").read_text()) == scored
    assert (scored["step"], scored["checkpoint"]) == (7, "latest")
    assert scored | {"split": "test", "beam": 2, "length_penalty": 0.6, "max_pairs": 12} == scored
    assert scored["sentences_per_second"] == pytest.approx(48 / scored["seconds"])
    assert list(scored["directions"]) == ["en-de", "de-en", "en-zh_Hant", "zh_Hant-en"]
    assert all(one["pairs"] == 12 for one in scored["directions"].values())
    assert all(3 < one["nll"] < 20 for one in scored["directions"].values())  # random weights: log 1200 is 7.1
    assert all(0 < one["plain"]["pairs"] <= 12 for one in scored["directions"].values())
    assert scored["directions"]["en-de"]["train_pairs"] > 300
    assert scored["thirds"].keys() == {"de", "zh_Hant"}
    for name, one in scored["directions"].items():
        found = score(texts("hyp")[f"{name}.hyp"], texts("ref")[f"{name}.ref"])
        assert (one["bleu"], one["chrf"]) == (found["bleu"], found["chrf"])
    assert len({line for lines in texts("hyp").values() for line in lines}) > 5
    chrf = [one["chrf"] for one in scored["directions"].values()]
    assert scored["macro"]["chrf"]["all"] == pytest.approx(sum(chrf) / 4)


@pytest.mark.parametrize("into_english", [False, True])
def test_pairs_with_a_placeholder_in_their_english_are_left_out_of_the_plain_scores(into_english):
    english, other = ["open %s now", "the red house", "a cat"], ["x y z", "das rote %s Haus", "eine Katze"]
    lines, references = (other, english) if into_english else (english, other)
    source, target = ("de", "en") if into_english else ("en", "de")
    direction = Direction("de", source, target, [[]] * 3, [[1], [1, 2], [1]], lines, references)
    record = direction.record(references, [9.0, 3.0, 2.0])
    assert (record["pairs"], record["nll"]) == (3, 14 / 7)
    assert (record["plain"]["pairs"], record["plain"]["nll"]) == (2, 5 / 5)


def test_each_direction_is_printed_and_what_the_means_are_of(scored):
    console = Console(record=True, width=500, file=io.StringIO())
    _print_scores(find_run("made"), scored, console)
    text = console.export_text()
    for name, scores in scored["directions"].items():
        cells = (name, scores["train_pairs"], 12, *(scores[measure] for measure in ("nll", "chrf", "bleu")))
        assert f"| {' | '.join(map(readable, cells))} |" in text
    assert "means over 2 languages and both directions, each direction with equal weight, checkpoint of step 7" in text
    assert "high, middle and low: thirds of the languages by training pairs" in text


def test_the_nll_of_the_references_is_that_of_validation(scored):
    """Forced decoding gives the test pairs the NLL that the training's validation would."""
    run = find_run("made")
    experiment = find_text_run(run)
    data = TextData(folder_of(experiment.text, Path(".cache")), with_test=True)
    (direction, _) = directions("de", data, scored_rows("de", data, 12))
    layers, total = suite.load("made").layers, 0.0
    for source, target in zip(direction.sources, direction.targets, strict=True):
        tensors = (torch.tensor([source]), torch.tensor([[BEGIN_ID, *target]]))
        for layer in layers:
            tensors = layer(*tensors) if isinstance(tensors, tuple) else layer(tensors)
        labels = torch.tensor([*target, END_ID])
        total += float(torch.nn.functional.cross_entropy(tensors[0].detach(), labels, reduction="sum"))
    tokens = sum(len(target) + 1 for target in direction.targets)
    assert scored["directions"]["en-de"]["nll"] == pytest.approx(total / tokens, rel=1e-5)


def test_the_texts_are_pairs_of_the_test_split(scored):
    data = TextData(folder_of(find_text_run(find_run("made")).text, Path(".cache")), with_test=True)
    pairs = {(one["english_text"], one["translation_text"]) for one in data.splits["test"]}
    sources, references = texts("src"), texts("ref")
    there = zip(sources["en-de.src"], references["en-de.ref"], strict=True)
    back = zip(references["de-en.ref"], sources["de-en.src"], strict=True)
    for english, german in [*there, *back]:
        assert (english, german) in pairs
    assert len(set(sources["en-de.src"])) > 6


def test_only_scoring_asks_for_the_test_pairs():
    """Whoever opens a text without asking gets none: training, validation and tuning do."""
    files = [path for room in ("suite", "models", "experiments", "launch") for path in (ROOT / room).rglob("*.py")]
    asking = {str(path.relative_to(ROOT)) for path in files if "with_test=True" in path.read_text()}
    assert asking == {"launch/inference/score.py"}


@pytest.mark.parametrize("verb", ["score", "export"])
def test_a_run_in_use_by_another_process_is_rejected(scored, verb):
    """Another process holds the lock; the files of the run do not change."""
    run = find_run("made")
    path, use = {
        "score": (run.path / "lock", lambda: score_run(run, ScoreSettings(beam=1, max_pairs=2), QUIET)),
        "export": (run.path / "export.lock", lambda: export("made", QUIET)),
    }[verb]
    hold = f"import filelock; lock = filelock.FileLock({str(path)!r}); lock.acquire(); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}
        with pytest.raises(SettingError, match=f"another process is using run .*{run.path.name}.*; wait until it ends"):
            use()
        assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()} == before
        holder.communicate(b"\n")


def test_a_text_is_translated_alike_at_any_k(scored):
    run = find_run("made")
    data = load_data(run, find_text_run(run), TextData, QUIET)
    lines = texts("src")["de-en.src"]
    sources = [source_of(line, "en", data, 32) for line in lines]

    def written(beam):
        tokens = translated(run, sources, beam=beam).results
        return [one_line(text) for text in data.tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    assert written(2) == texts("hyp")["de-en.hyp"], "scored on two stages, translated on one"
    at, text = next((at, text) for at, text in enumerate(written(SIZE)) if text)
    found = call("translate", "made", "--to", "en", lines[at])
    assert found == (0, f"{text}\n", "checkpoint of step 7, the latest one\n")


def test_the_end_of_a_run_shows_three_held_out_strings_and_its_page_too(tmp_path, monkeypatch):
    """The three languages with the most pairs, beside what ``gpipe translate`` finds for the same strings."""
    run = find_run("made")
    experiment, console = find_text_run(run), Console(file=io.StringIO(), width=10_000)
    data = load_data(run, experiment, TextData, QUIET)
    threads, decode = [], Decoder.run
    with monkeypatch.context() as patched:
        patched.setattr(Decoder, "run", lambda *args: (threads.append(torch.get_num_threads()), decode(*args)))
        samples = translate_held_out(run, experiment, console)
    assert threads == [1]
    largest = sorted(data.languages, key=lambda code: -data.pairs[code])[:3]
    assert [sample["direction"] for sample in samples] == [
        f"en-{largest[0]}", f"{largest[1]}-en", f"en-{largest[2]}",
    ]  # fmt: skip
    pairs = set(data.texts("valid", range(sum(data.sizes["valid"]))))
    for sample in samples:
        source, target = sample["direction"].split("-")
        pair = (sample["source"], sample["reference"])
        assert len(sample["source"].split()) >= 3
        assert (pair if source == "en" else pair[::-1]) in {tuple(map(one_line, texts)) for texts in pairs}
        tokens = translated(run, [source_of(sample["source"], target, data, 32)]).results
        assert sample["translation"] == one_line(data.tokenizer.decode(tokens[0], skip_special_tokens=True))
    assert any(sample["translation"] for sample in samples)
    alone = experiment.model_copy(update={"text": experiment.text.model_copy(update={"languages": (largest[0],)})})
    with monkeypatch.context() as patched:
        patched.setattr(random.Random, "sample", lambda self, rows, count: rows[:count])
        first, _, third = [texts for _, texts in held_out_samples._draw(alone, data)]
    assert first != third, "a sample is shown twice"
    lines = described(samples)
    assert lines[:2] == [
        "held-out strings of the languages with the most text:",
        f"  en-{largest[0]}  {samples[0]['source']}",
    ]
    assert lines[9] == f"    reference {samples[2]['reference']}"
    shutil.copy(run.samples, tmp_path / "samples.jsonl")
    section = score_section(SimpleNamespace(scores={}, run=RunFolder(tmp_path)))
    assert [row[0] for row in section.tables[0].rows] == [sample["direction"] for sample in samples]
    assert section.tables[0].rows[1][3] == samples[1]["reference"]


def test_no_held_out_strings_are_shown_without_them_without_a_checkpoint_or_of_a_large_model(capsys, monkeypatch):
    console = Console(width=10_000)
    bare = find_run("bare")
    assert translate_held_out(bare, find_text_run(bare), console) == []
    assert capsys.readouterr().out.startswith("no held-out strings are translated: ")
    assert not bare.samples.exists()
    with monkeypatch.context() as patched:
        patched.setattr("launch.inference.held_out_samples._draw", lambda *args: iter(()))
        assert translate_held_out(bare, find_text_run(bare), console) == []
    with monkeypatch.context() as patched:
        patched.setattr("launch.inference.held_out_samples.TextData", Mock(side_effect=OSError("gone")))
        assert translate_held_out(bare, find_text_run(bare), console) == []
    assert capsys.readouterr().out == "no held-out strings are translated: gone\n"
    assert translate_held_out(bare, find("t128_6b"), console) == []
    assert "one core is too slow for 6," in capsys.readouterr().out
    assert translate_held_out(bare, find("transformer_13"), console) == []
    assert capsys.readouterr().out == ""
    assert score_section(SimpleNamespace(scores={}, run=bare)).tables == []
    assert described([]) == []


def test_an_export_has_the_weights_the_tokenizer_and_the_sizes(scored):
    folder = export("made", QUIET)
    assert {path.name for path in folder.iterdir()} >= {"model.safetensors", "tokenizer.json", "config.json"}
    model = suite.load("made")
    for value in model.state_dict().values():
        value.zero_()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    before = suite.load("made").state_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    experiment = find_text_run(find_run("made"))
    sizes = json.loads((folder / "config.json").read_text())
    assert (sizes["step"], sizes["width"], sizes["blocks_per_stack"]) == (7, 32, 1)
    text = "Save the file"
    ids = PreTrainedTokenizerFast.from_pretrained(folder)(text).input_ids
    assert ids == load_data(find_run("made"), experiment, TextData, QUIET).tokenizer(text).input_ids


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["score", "made", "--set", "score.languages=de,777"], ["know the language '777'", "known names"]),
        (["score", "made", "--set", "score.languages=udm"], ["scoring needs 50 test pairs", "udm has"]),
        (["score", "made", "--set", "score.beam=0"], ["score.beam takes an integer, 1 or more; it was given 0"]),
        (["score", "made", "--set", "score.stages=6"], ["stages is 6", "5 layers"]),
        (["export", "bare"], ["no valid checkpoint"]),
        (["score", "bare"], ["bare has no valid checkpoint", "gpipe resume"]),
        (["translate", "made", "--to", "de", "--checkpoint", "9", "text"], ["no checkpoint of step 9", "of steps 7"]),
        (["score", "made", "--checkpoint", "best"], ["has no best checkpoint", "train.validate_every"]),
        (["export", "made", "--checkpoint", "newest"], ["unknown checkpoint 'newest'", "best, latest"]),
        (["translate", "made", "--to", "dee", "text"], ["know the language 'dee'", "did you mean de"]),
        (["translate", "made", "--to", "de", "  "], ["is empty", "TEXT"]),
    ],
)
def test_what_score_refuses_is_one_line(arguments, parts):
    printed = refusal(*arguments)
    assert all(part in printed for part in parts), printed


def test_a_language_that_was_not_sampled_is_unknown_to_the_model():
    """The vocabulary has a token for each language of the corpus; the model learned only those of its settings."""
    run, made = named_run("t12_400m", "german"), find_run("made")
    run.experiment.write_text(made.experiment.read_text().replace("[text]", '[text]\nlanguages = ["de"]'))
    shutil.copytree(made.checkpoints, run.checkpoints)
    assert find_text_run(run).text.languages == ("de",)
    found = score_run(run, ScoreSettings(beam=1, max_pairs=2, stages=1), QUIET)
    assert set(found["directions"]) == {"en-de", "de-en"}
    with pytest.raises(SettingError, match="the model does not know the language 'fr'"):
        score_run(run, ScoreSettings(beam=1, languages=("fr",), max_pairs=2, stages=1), QUIET)
    with pytest.raises(SettingError, match="the model does not know the language 'fr'"):
        translate("german", "fr", "Save the file", QUIET)
