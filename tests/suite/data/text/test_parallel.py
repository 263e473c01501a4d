"""A folder of parallel text: every format, its own or our held-out text, and errors."""

import pytest

from suite.data.text.parallel import read_parallel_folder
from suite.data.text.prepare import folder_of, prepare
from suite.data.text.splitting import SPLITS, TEST, TRAIN, VALID
from suite.errors import DataError, SettingError
from suite.settings import TextSettings
from tests.suite.data.text.pair_files import KINDS, write_pairs

PAIRS = [(f"The {animal} number {at} runs", f"Das Tier {animal} Nummer {at} läuft")
         for at, animal in enumerate(["cat", "dog", "cow", "hen"] * 50)]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_pairs(tmp_path, kind):
    write_pairs(tmp_path, "train", PAIRS[:150], kind)
    write_pairs(tmp_path, "dev", PAIRS[150:170], kind)
    write_pairs(tmp_path, "test", PAIRS[170:], kind)
    log = []
    parts = read_parallel_folder(str(tmp_path), True, log.append)
    assert sorted(parts[TRAIN]["de"]) == sorted(PAIRS[:150])
    assert parts[VALID]["de"] == PAIRS[150:170]
    assert parts[TEST]["de"] == PAIRS[170:]
    assert log == ["de: 150 training pairs, 0 dropped by cleaning, 0 because their English side is held out: 150 left"]


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_byte_order_mark_is_no_text_and_compressed_files_are_read(tmp_path, kind):
    write_pairs(tmp_path, "train", PAIRS, f"{kind}.gz", head=b"\xef\xbb\xbf")
    parts = read_parallel_folder(str(tmp_path), False, print)
    assert {pair for name in SPLITS for pair in parts[name]["de"]} == set(PAIRS)


@pytest.mark.parametrize("name", ["en-es_419", "zh-Hans-en", "sr@latin-en"])
def test_codes_with_regions_and_scripts_are_read(tmp_path, name):
    write_pairs(tmp_path, "train", PAIRS)
    (tmp_path / f"train.{name}.tsv").write_text("".join(f"{english} a\t{other} b\n" for other, english in PAIRS))
    assert len(read_parallel_folder(str(tmp_path), False, print)[TRAIN]) == 2


def test_files_that_are_not_used_are_named_in_one_line_a_reason(tmp_path):
    write_pairs(tmp_path, "train", PAIRS)
    write_pairs(tmp_path, "valid", PAIRS[:2], "tsv")
    write_pairs(tmp_path, "test", PAIRS[2:4], "tsv")
    (tmp_path / "valid.fr-en.tsv").write_text("le chat\tthe cat\n")
    for name in (".DS_Store", ".git/HEAD", ".a.swp", "._train.de-en.tsv", "README.md", "old/train.de-en.tsv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\0\xff")
    (tmp_path / ".#train.de-en.de").symlink_to("user@host")
    log = []
    assert set(read_parallel_folder(str(tmp_path), True, log.append)[TRAIN]) == {"de"}
    hidden, others, training, untrained = log
    assert hidden == (
        f"ignored in {tmp_path}: 5 hidden files and folders "
        "(.#train.de-en.de, .DS_Store, ._train.de-en.tsv, .a.swp, .git)"
    )
    assert others == (
        f"ignored in {tmp_path}: 2 files without a name such as train.de-en.tsv (README.md, old/train.de-en.tsv)"
    )
    assert training.startswith("de: 200 training pairs")
    assert untrained == "valid pairs of languages without training pairs are not used: fr"


def test_a_huge_field_is_dropped_and_every_pair_is_accounted_for(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    write_pairs(own, "train", [*PAIRS, ("The cat " * 20_000, "Die Katze " * 20_000)], "tsv")
    log = []
    settings = TextSettings(corpus=str(own), vocabulary=400, max_length=60, clean=False)
    data = prepare(settings, tmp_path / "cache", log.append)
    counts = {name: sum(sizes) for name, sizes in data.sizes.items()}
    assert sum(counts.values()) == len(PAIRS)
    assert log[1].startswith("de: 201 training pairs, 0 dropped as repeated or empty")
    (dropped,) = [line for line in log if line.endswith("pairs longer than text.max_length=60")]
    counts[dropped.split()[2]] += 1
    assert log[2] == (
        f"no valid and test files: of all 201 pairs {counts[VALID]} are held out for validation and {counts[TEST]} for "
        "the test, by their English side"
    )
    read_parallel_folder(str(own), True, log.append)
    assert log[-2].startswith("de: 201 training pairs, 1 dropped by cleaning")


def test_training_pairs_of_held_out_english_are_dropped_and_counted(tmp_path):
    write_pairs(tmp_path, "train", [*PAIRS[:20], *PAIRS[:3], ("", "leer"), ("%s files", "Dateien")])
    write_pairs(tmp_path, "valid", PAIRS[5:6])
    write_pairs(tmp_path, "test", [("The CAT number 8 runs!", "Anders übersetzt")])
    log = []
    parts = read_parallel_folder(str(tmp_path), True, log.append)
    assert set(parts[TRAIN]["de"]) == set(PAIRS[:20]) - {PAIRS[5], PAIRS[8]}
    assert log == ["de: 25 training pairs, 5 dropped by cleaning, 2 because their English side is held out: 18 left"]
    raw = read_parallel_folder(str(tmp_path), False, log.append)
    assert len(raw[TRAIN]["de"]) == 19
    assert ("%s files", "Dateien") in raw[TRAIN]["de"]
    assert "25 training pairs, 4 dropped as repeated or empty, 2 because" in log[-1]


def test_it_is_prepared_like_any_corpus_and_anew_when_a_file_changes(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    write_pairs(folder, "train", PAIRS)
    dutch = "".join(f"{english}\tHet dier {at}\n" for at, (english, _) in enumerate(PAIRS))
    (folder / "train.en-nl.tsv").write_text(dutch)
    settings = TextSettings(corpus=str(folder), vocabulary=400, max_length=60)
    data = prepare(settings, tmp_path / "cache", print)
    assert data.languages == ("de", "nl")
    assert sum(sum(sizes) for sizes in data.sizes.values()) == 2 * len(PAIRS)
    before = folder_of(settings, tmp_path / "cache")
    (folder / ".ipynb_checkpoints").mkdir()
    write_pairs(folder / ".ipynb_checkpoints", "train", PAIRS)
    assert folder_of(settings, tmp_path / "cache") == before
    write_pairs(folder, "train", PAIRS[:-1])
    assert folder_of(settings, tmp_path / "cache") != before


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train.de-en.de": b"a\nb\n", "train.de-en.en": b"a\n"}, r"has 2 lines and train\.de-en\.en 1; line n of one"),
        ({"train.de-en.de": b"a\n"}, r"has no other side train\.de-en\.en"),
        ({"train.de-fr.tsv": b"a\tb\n"}, "has no English side"),
        ({"train.de-en.tsv": b"a\tb\nc\n"}, "line 2 has 1 columns, not 2"),
        ({"train.de-en.jsonl": b'{"de": "a", "en": "b"}\n{"de": "a"}\n'}, 'line 2 has no text under "en"'),
        ({"train.de-en.jsonl": b'\n{"translation": null}'}, 'line 2 has no text under "de"'),
        ({"train.en-en.tsv": b"a\tb\n"}, r"train\.en-en\.tsv: en is not the code of a language other than English"),
        ({"train.de-en.en": b"a\n"}, r"has no other side train\.de-en\.de"),
        ({"train.de-en.tsv.gz": b"a\tb\n"}, r"train\.de-en\.tsv\.gz cannot be read: BadGzipFile"),
        ({"train.de-en.de": b"a\n", "train.de-en.en": b"a\n\xff"}, r"\.en is not UTF-8 \(line 2, byte 2"),
        ({"train.de-en.parquet": b"no"}, "cannot be read: ArrowInvalid"),
        ({"train.de-en.doc": b"a"}, "has an unknown format"),
        ({"test.de-en.tsv": b"a\tb\n"}, "has test files but no valid files"),
        ({"dev.de-en.tsv": b"a\tb\n", "test.de-en.tsv": b"a\tb\n"}, "has no training text"),
        ({"train.de-en.tsv": b"a\t\n"}, "no training pair of .* is left"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_parallel_folder(str(tmp_path), True, print)


def test_other_corpora_are_always_cleaned(tmp_path):
    with pytest.raises(SettingError, match=r"text.clean=false is for a folder of your own text, and django is none"):
        prepare(TextSettings(corpus="django", clean=False), tmp_path, print)
