"""Translations of lines by a run: their order, lines that cannot be translated, and what is printed."""

import io
import shutil
import time

import pytest
from rich.console import Console

from experiments.base.cluster import Cluster
from launch.inference import decode as decoding
from launch.inference import translate as translating
from launch.inference.decode import DecodeOutput, find_text_run, stages_of
from launch.inference.decoding_methods import BeamSearch
from launch.inference.translate import lines_of, translate
from launch.runs.store import find_run, named_run
from suite.data.text.tokenizer import END_ID
from suite.errors import SettingError
from suite.pipeline.model.layers import count_parameters
from tests.launch.command_line import call, refusal

QUIET = Console(quiet=True)

pytestmark = pytest.mark.usefixtures("in_folder")


def test_by_default_there_are_as_few_stages_as_hold_the_weights(monkeypatch):
    experiment = find_text_run(find_run("made"))
    weights = 4 * count_parameters(experiment.build()[0])
    for share, expected in ((2.0, 1), (1.9, 2), (0.6, 4), (0.1, 4)):
        machine = Cluster(4, int(share * weights), "cpu")
        monkeypatch.setattr("launch.inference.decode.this_machine", lambda machine=machine: machine)
        assert stages_of(experiment, None) == expected
        assert stages_of(experiment, 5) == 5


def test_a_damaged_checkpoint_is_reported():
    run, made = named_run("t12_400m", "damaged"), find_run("made")
    shutil.copy(made.experiment, run.experiment)
    shutil.copytree(made.checkpoints, run.checkpoints)
    shutil.copytree(run.checkpoints / "00000007", run.checkpoints / "00000009")
    console = Console(record=True, width=500, file=io.StringIO())
    written = decoding.decode(run, [[1, END_ID]], BeamSearch(1, 32), 1, console)
    assert written.step == 7
    assert "00000009 is not used: bad manifest" in console.export_text()


def set_stdin(monkeypatch, data):
    """Replaces the standard input."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors="surrogateescape"))


def test_many_lines_are_translated_in_order_by_one_start_of_the_workers(monkeypatch):
    lines = ["Save the file", "", "Open", "Close the window now"]
    alone = [call("translate", "made", "--to", "de", line)[1] for line in lines if line]
    starts = []
    started = decoding.run_processes
    monkeypatch.setattr(decoding, "run_processes", lambda *a, **k: starts.append(1) or started(*a, **k))
    set_stdin(monkeypatch, "\n".join(lines).encode())
    for text in ("\n".join(lines), ""):  # empty: of standard input
        assert call("translate", "made", "--to", "de", text)[1] == alone[0] + "\n" + "".join(alone[1:])
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
