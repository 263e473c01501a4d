"""Scores, translations and exports of a run, and their errors."""

import io
import json
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save
from transformers import PreTrainedTokenizerFast

import suite
from experiments.base.cluster import Cluster
from experiments.registry import find
from experiments.report.table import readable
from experiments.translation.score_settings import ScoreSettings
from launch.inference import decode as decoding
from launch.inference import export as exporting
from launch.inference import translate as translating
from launch.inference.decode import DecodeOutput, find_text_run, stages_of
from launch.inference.decoding_methods import BeamSearch
from launch.inference.export import export
from launch.inference.held_out_samples import described, translate_held_out
from launch.inference.model_text import load_data, source_of
from launch.inference.score import _print_scores, directions, score_run, scored_rows
from launch.inference.translate import lines_of, translate
from launch.runs.store import RunFolder, find_run, named_run
from launch.watching.translation_samples import score_section
from suite.data.text.prepare import folder_of, prepare
from suite.data.text.text import TextData
from suite.data.text.tokenizer import BEGIN_ID, END_ID
from suite.decoding.beam import SIZE
from suite.decoding.decode import Decoder
from suite.errors import SettingError
from suite.evaluation.scores import one_line
from suite.pipeline.model.layers import count_parameters, materialize, ties_of
from suite.training.checkpoint import Storage
from suite.training.checkpoint.manifest import File, Manifest, digest, layer_file
from suite.training.wandb_run import Identity
from tests.launch.command_line import ROOT, call, refusal
from tests.launch.tracking.wandb_parts import parts

QUIET = Console(quiet=True)
SETTINGS = ScoreSettings(beam=2, languages=("de", "zh-tw"), max_pairs=12, stages=2)


def made_layers(experiment):
    """Returns the model with random weights."""
    found = []
    for index, layer in enumerate(experiment.build()[0]):
        made = materialize(layer, 0 if ties_of(layer) else index, torch.device("cpu"))
        made.load_state_dict({name: tensor * 3 for name, tensor in made.state_dict().items()})
        if index == 4:
            torch.nn.init.constant_(made.project.bias[END_ID : END_ID + 1], 5.0)  # some texts end before the limit
        found.append(made)
    return found


@pytest.fixture(scope="module")
def folder_of_runs(tmp_path_factory):
    """A folder with a run with random weights, and one without a checkpoint."""
    folder = tmp_path_factory.mktemp("scoring")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        experiment = find("t12_400m").with_settings(
            "text.corpus=django text.vocabulary=1200 text.max_length=24 model.layers=1 model.width=32 model.heads=1 "
            "model.feed_forward=32 pipeline.stages=1 optimizer.precision=fp32"
        )
        data = prepare(experiment.text, Path(".cache"), lambda _: None)
        for name in ("made", "bare"):
            named_run("t12_400m", name).experiment.write_text(experiment.to_toml())
        files, storage = {}, Storage(Path("runs/t12_400m/made/checkpoints").resolve())
        for index, layer in enumerate(made_layers(experiment)):
            values = {f"value/{name}": tensor for name, tensor in layer.state_dict().items()}
            files[layer_file(index, "save")] = File(bytes=len(save(values)), sha256=digest(save(values)))
            storage.write(f"00000007/{layer_file(index, 'save')}", save(values))
        notes = {"vocabulary": data.digest}
        manifest = Manifest(step=7, written=time.time(), files=files, notes=notes)
        storage.write("00000007/manifest.json", manifest.encode())
        yield folder


@pytest.fixture(autouse=True)
def _in_folder(folder_of_runs, monkeypatch):
    monkeypatch.chdir(folder_of_runs)


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
    (thirds,) = run.glob("wandb/offline-run-*/files/media/table/scores/thirds_*.table.json")
    table = json.loads(thirds.read_text())
    assert table["columns"] == ["measure", *scored["macro"]["bleu"]]
    assert table["data"] == [[measure, *means.values()] for measure, means in scored["macro"].items()]
    assert sorted(name.partition("-scores")[0] for name in part.artifacts) == ["run-abcd", "run-abcd"]


def test_the_files_of_scores(scored):
    assert json.loads((find_run("made").path / "scores.json").read_text()) == scored
    assert (scored["step"], scored["checkpoint"]) == (7, "latest")
    assert scored | {"split": "test", "beam": 2, "length_penalty": 0.6, "max_pairs": 12} == scored
    assert scored["sentences_per_second"] == pytest.approx(48 / scored["seconds"])
    assert list(scored["directions"]) == ["en-de", "de-en", "en-zh_Hant", "zh_Hant-en"]
    assert all(one["pairs"] == 12 for one in scored["directions"].values())
    assert all(3 < one["nll"] < 20 for one in scored["directions"].values())  # random weights: log 1200 is 7.1
    for language, kinds in scored["overlap"].items():
        assert list(kinds) == ["none", "near", "case_folded", "exact"]
        assert sum(kinds.values()) == 12
        assert scored["directions"][f"en-{language}"]["distinct"]["pairs"] == kinds["none"]
    assert scored["directions"]["en-de"]["train_pairs"] > 300
    assert scored["thirds"].keys() == {"de", "zh_Hant"}
    chrf = [one["chrf"] for one in scored["directions"].values()]
    assert scored["macro"]["chrf"]["all"] == pytest.approx(sum(chrf) / 4)
    assert set(scored["macro"]["bleu"]) == {"all", "high", "middle", "low"}


def test_each_direction_is_printed_and_what_the_means_are_of(scored):
    console = Console(record=True, width=500, file=io.StringIO())
    _print_scores(find_run("made"), scored, console)
    text = console.export_text()
    for name, scores in scored["directions"].items():
        cells = (name, scores["train_pairs"], 12, *(scores[measure] for measure in ("nll", "chrf", "bleu")))
        assert f"| {' | '.join(map(readable, cells))} |" in text
    assert "means over 2 languages and both directions, each direction with equal weight, checkpoint of step 7" in text
    assert "high, middle and low: thirds of the languages by training pairs" in text


def test_the_help_suggests_settings_of_scoring():
    _, shown, _ = call("score", "--help")
    assert "score.beam=1" in shown
    assert "train.steps" not in shown


def test_the_nll_of_the_references_is_that_of_validation(scored):
    """Forced decoding gives the test pairs the NLL that the training's validation would."""
    run = find_run("made")
    experiment = find_text_run(run)
    data = TextData(folder_of(experiment.text, Path(".cache")), with_test=True)
    (direction, _) = directions("de", data, scored_rows("de", data, 12))
    layers = [layer.eval() for layer in made_layers(experiment)]
    total = 0.0
    for source, target in zip(direction.sources, direction.targets, strict=True):
        tensors = (torch.tensor([source]), torch.tensor([[BEGIN_ID, *target]]))
        for layer in layers:
            tensors = layer(*tensors) if isinstance(tensors, tuple) else layer(tensors)
        labels = torch.tensor([*target, END_ID])
        total += float(torch.nn.functional.cross_entropy(tensors[0].detach(), labels, reduction="sum"))
    tokens = sum(len(target) + 1 for target in direction.targets)
    assert scored["directions"]["en-de"]["nll"] == pytest.approx(total / tokens, rel=1e-5)


def test_the_texts_are_pairs_of_the_test_split(scored):
    experiment = find("t12_400m").with_settings("text.corpus=django text.vocabulary=1200 text.max_length=24")
    data = TextData(folder_of(experiment.text, Path(".cache")), with_test=True)
    pairs = {(one["english_text"], one["translation_text"]) for one in data.splits["test"]}
    sources, references = texts("src"), texts("ref")
    there = zip(sources["en-de.src"], references["en-de.ref"], strict=True)
    back = zip(references["de-en.ref"], sources["de-en.src"], strict=True)
    for english, german in [*there, *back]:
        assert (english, german) in pairs
    assert len(set(sources["en-de.src"])) > 6


def test_only_scoring_asks_for_the_test_pairs():
    """Whoever opens a text without asking gets none (``test_overlap.py``): training, validation and tuning do."""
    files = [path for room in ("suite", "models", "experiments", "launch") for path in (ROOT / room).rglob("*.py")]
    asking = {str(path.relative_to(ROOT)) for path in files if "with_test=True" in path.read_text()}
    assert asking == {"launch/inference/score.py"}


def test_sacrebleus_command_line_gives_the_same_scores(scored):
    folder = find_run("made").path / "scores"
    for direction in ("en-de", "zh_Hant-en"):
        files = [f"{direction}.ref", "-i", f"{direction}.hyp"]
        command = [str(Path(sys.executable).with_name("sacrebleu")), *files, "-m", "bleu", "chrf", "-w", "12"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
        bleu, chrf = json.loads(done.stdout)
        ours = scored["directions"][direction]
        assert (ours["bleu"], ours["chrf"]) == pytest.approx((bleu["score"], chrf["score"]), abs=1e-9)
        assert scored["signatures"] == {"bleu": bleu["signature"], "chrf": chrf["signature"]}


@pytest.mark.parametrize("verb", ["score", "export"])
def test_a_run_in_use_by_another_process_is_rejected(scored, verb):
    """Another process holds the lock; the files of the run do not change."""
    run = find_run("made")
    name = {"score": "lock", "export": "export.lock"}[verb]
    path = str(run.path / name)
    use = {
        "score": partial(score_run, run, ScoreSettings(beam=1, max_pairs=2), QUIET),
        "export": partial(export, "made", QUIET),
    }[verb]
    hold = f"import filelock; lock = filelock.FileLock({path!r}); lock.acquire(); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}
        with pytest.raises(SettingError, match=f"another process is using run .*{run.path.name}.*; wait until it ends"):
            use()
        assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()} == before
        holder.communicate(b"\n")


@pytest.mark.slow
def test_scores_are_equal_for_any_k(scored):
    before = texts("hyp")
    assert len({line for lines in before.values() for line in lines}) > 5
    again = score_run(find_run("made"), SETTINGS.model_copy(update={"stages": 1}), QUIET)
    assert texts("hyp") == before
    for name, before in scored["directions"].items():
        # stages use other numbers of threads, which change the last bits of a loss
        assert again["directions"][name] == approximately(before)


def approximately(scores):
    """The scores with losses that may differ in their last bits."""
    parts = {name: approximately(part) for name, part in scores.items() if isinstance(part, dict)}
    nll = {"nll": pytest.approx(scores["nll"], rel=1e-6)} if scores.get("nll") is not None else {}
    return scores | parts | nll


def test_a_text_is_translated(scored):
    run = find_run("made")
    data = load_data(run, find_text_run(run), TextData, QUIET)
    lines = texts("src")["de-en.src"]
    tokens = translated(run, [source_of(line, "en", data, 24) for line in lines]).results
    written = [one_line(text) for text in data.tokenizer.batch_decode(tokens, skip_special_tokens=True)]
    at = next(at for at, text in enumerate(written) if text)
    found = call("translate", "made", "--to", "en", lines[at])
    assert found == (0, f"{written[at]}\n", "checkpoint of step 7, the latest one\n")


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
        tokens = translated(run, [source_of(sample["source"], target, data, 24)]).results
        assert sample["translation"] == one_line(data.tokenizer.decode(tokens[0], skip_special_tokens=True))
    assert any(sample["translation"] for sample in samples)
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
    assert (sizes["step"], sizes["width"], sizes["layers"]) == (7, experiment.model.width, experiment.model.layers)
    text = "Save the file"
    ids = PreTrainedTokenizerFast.from_pretrained(folder)(text).input_ids
    assert ids == load_data(find_run("made"), experiment, TextData, QUIET).tokenizer(text).input_ids


def test_an_export_that_fails_keeps_the_previous_one(scored, monkeypatch):
    folder = export("made", QUIET)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fails(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "save_file", fails)
    with pytest.raises(KeyboardInterrupt):
        export("made", QUIET)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    monkeypatch.undo()
    assert export("made", QUIET) == folder


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["score", "made", "--set", "score.languages=de,777"], ["know the language '777'", "known names"]),
        (["score", "made", "--set", "score.languages=en"], ["know the language 'en'"]),
        (["score", "made", "--set", "score.languages=udm"], ["scoring needs 50 test pairs", "udm has"]),
        (["score", "made", "--set", "score.beams=2"], ["score.beams", "did you mean score.beam"]),
        (["score", "made", "--set", "score.beam=0"], ["score.beam takes an integer, 1 or more; it was given 0"]),
        (["score", "made", "--set", "score.stages=6"], ["stages is 6", "5 layers"]),
        (["export", "bare"], ["no valid checkpoint"]),
        (["score", "bare"], ["bare has no valid checkpoint", "gpipe resume"]),
        (["translate", "bare", "--to", "de", "text"], ["no valid checkpoint"]),
        (["translate", "made", "--to", "de", "--checkpoint", "9", "text"], ["no checkpoint of step 9", "of steps 7"]),
        (["score", "made", "--checkpoint", "best"], ["has no best checkpoint", "train.validate_every"]),
        (["export", "made", "--checkpoint", "newest"], ["unknown checkpoint 'newest'", "best, latest"]),
        (["translate", "made", "--to", "dee", "text"], ["know the language 'dee'", "did you mean de"]),
        (["translate", "made", "--to", "de", "  "], ["is empty", "TEXT"]),
        (["translate", "made", "--to", "de", "word " * 40], ["tokens", "at most 24"]),
    ],
)
def test_a_users_error_is_one_sentence(arguments, parts):
    printed = refusal(*arguments)
    for part in parts:
        assert part in printed


def test_by_default_there_are_as_few_stages_as_hold_the_weights(monkeypatch):
    experiment = find_text_run(find_run("made"))
    weights = 4 * count_parameters(experiment.build()[0])
    for share, expected in ((2.0, 1), (1.9, 2), (0.6, 4), (0.1, 4)):
        machine = Cluster(4, int(share * weights), "cpu")
        monkeypatch.setattr("launch.inference.decode.this_machine", lambda machine=machine: machine)
        assert stages_of(experiment, None) == expected
        assert stages_of(experiment, 5) == 5


def copied(name, change=lambda text: text):
    """Returns a copy of the run with other settings."""
    run = named_run("t12_400m", name)
    made = find_run("made")
    run.experiment.write_text(change(made.experiment.read_text()))
    shutil.copytree(made.checkpoints, run.checkpoints)
    return run


def test_a_damaged_checkpoint_is_reported():
    run = copied("damaged")
    shutil.copytree(run.checkpoints / "00000007", run.checkpoints / "00000009")
    console = Console(record=True, width=500, file=io.StringIO())
    written = translated(run, [[1, END_ID]], console, beam=1)
    assert written.step == 7
    assert "00000009 is not used: bad manifest" in console.export_text()


def test_a_language_that_was_not_sampled_is_unknown_to_the_model():
    """The vocabulary has a token for each language of the corpus; the model learned only those of its settings."""
    run = copied("german", lambda text: text.replace("[text]", '[text]\nlanguages = ["de"]'))
    assert find_text_run(run).text.languages == ("de",)
    found = score_run(run, ScoreSettings(beam=1, max_pairs=2, stages=1), QUIET)
    assert set(found["directions"]) == {"en-de", "de-en"}
    with pytest.raises(SettingError, match="the model does not know the language 'fr'"):
        score_run(run, ScoreSettings(beam=1, languages=("fr",), max_pairs=2, stages=1), QUIET)
    with pytest.raises(SettingError, match="the model does not know the language 'fr'"):
        translate("german", "fr", "Save the file", QUIET)


def set_stdin(monkeypatch, data):
    """Replaces the standard input."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors="surrogateescape"))


def test_many_lines_are_translated_in_order_by_one_start_of_the_workers(monkeypatch):
    lines = ["Save the file", "", "Open", "Close the window now", "Delete"]
    alone = []
    for line in lines:
        if line:
            console = Console(record=True, width=500, file=io.StringIO())
            translate("made", "de", line, console)
            alone.append(console.export_text())
    starts = []
    started = decoding.run_processes
    monkeypatch.setattr(decoding, "run_processes", lambda *a, **k: starts.append(1) or started(*a, **k))
    for source in ("text", "standard input"):
        set_stdin(monkeypatch, "\n".join(lines).encode())
        console = Console(record=True, width=500, file=io.StringIO())
        translate("made", "de", "\n".join(lines) if source == "text" else "", console)
        assert console.export_text() == alone[0] + "\n" + "".join(alone[1:])
    assert len(starts) == 2


def test_a_line_that_is_too_long_is_named_and_gives_an_empty_line(monkeypatch):
    def echo(run, sources, method, stages, console, on_sentence, choice):
        for at, source in enumerate(sources):
            on_sentence(at, source[1:-1])
        return DecodeOutput([], 7, 1.0)

    monkeypatch.setattr(translating, "decode", echo)
    set_stdin(monkeypatch, b"\xef\xbb\xbfOpen\n\n" + b"Save the file " * 30 + b"\nDelete\n")
    code, out, errors = call("translate", "made", "--to", "de", "")
    assert (code, out) == (0, "Open\n\n\nDelete\n")
    assert "line 3 is skipped: the text has " in errors
    assert errors.count("skipped") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Save the file " * 30, "the text has .* tokens, two special ones"),
        ("caf\udce9", "the text has bytes that are not"),
    ],
)
def test_a_text_without_a_line_that_can_be_translated_is_refused(text, message):
    with pytest.raises(SettingError, match=message):
        translate("made", "de", f"{text}\n{text}", QUIET)


def test_only_line_feeds_end_a_line():
    assert lines_of("a\u2028b\x0cc\x85d\r\n\ne\n") == ["a\u2028b\x0cc\x85d", "", "e"]
    assert lines_of("") == []
    assert lines_of("a") == ["a"]


def test_standard_input_that_is_not_utf_8_is_one_sentence(monkeypatch):
    set_stdin(monkeypatch, "Save the file\nDatei öffnen\n".encode("latin-1"))
    assert refusal("translate", "made", "--to", "de", "") == (
        "error: standard input is not UTF-8 text: byte 0xf6 at offset 20, in line 2; "
        "convert it first, for example with iconv\n"
    )


@pytest.mark.parametrize("closed", [False, True])
def test_without_a_line_on_standard_input_there_is_nothing_to_translate(monkeypatch, closed):
    set_stdin(monkeypatch, b"\n \n")
    if closed:
        monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(SettingError, match="the text to translate is empty"):
        translate("made", "de", "", QUIET)


def test_a_line_that_could_not_be_printed_is_printed_again(monkeypatch, tmp_path):
    logged, printed = [], []
    monkeypatch.setattr(decoding, "POLL_S", 0.05)
    monkeypatch.setattr(decoding, "log_error", logged.append)
    progress = tmp_path / "progress"

    def print_once(at, tokens):
        if at == 1 and not logged:
            raise BlockingIOError("the terminal is busy")
        printed.append((at, tokens))

    with decoding._progress_polled(progress, print_once):
        progress.write_bytes(b"[0, [7]]\n[1, [8, 9]]\n[2, []]\n[3")
        deadline = time.monotonic() + 30
        while len(printed) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        with progress.open("ab") as file:
            file.write(b", [5]]\n")
    assert printed == [(0, [7]), (1, [8, 9]), (2, []), (3, [5])]
    assert [type(error) for error in logged] == [BlockingIOError]


def test_a_failed_print_loses_no_line_and_missing_lines_are_reported(monkeypatch):
    printed, failures = [], [OSError("no room")]

    class Out:
        def print(self, text):
            if text == "" and failures:
                raise failures.pop()
            printed.append(text)

    def decoded(run, sources, method, stages, console, on_sentence, choice):
        with pytest.raises(OSError, match="no room"):
            on_sentence(0, sources[0])
        on_sentence(0, sources[0])
        if len(sources) == 2:
            on_sentence(1, sources[1])
        return DecodeOutput([], 7, 1.0)

    monkeypatch.setattr(translating, "decode", decoded)
    translate("made", "de", "Open\n\nDelete", Out())
    assert len(printed) == 3
    assert printed[1] == ""
    failures.append(OSError("no room"))
    with pytest.raises(RuntimeError, match="only 2 of 5 lines were printed"):
        translate("made", "de", "Open\n\nDelete\nSave\nClose", Out())
