"""Own text: what a folder may hold, what is held out, what is dropped, and that every text comes back."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.data.documents.docstrings import read_docstrings
from suite.data.documents.folder import TEST, TRAIN, VALID, read_folder
from suite.data.documents.prepare import folder_of_documents, prepare_documents
from suite.data.documents.splitting import HELD_OUT_SHARE, split
from suite.data.documents.tokenizer import END, END_ID, token_bytes
from suite.data.packages import DJANGO
from suite.data.tokens import encode_all
from suite.errors import DataError, SettingError
from suite.settings import DocumentSettings
from tests.suite.data.documents.writing import document, write_folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("documents")
    settings = DocumentSettings(corpus=str(write_folder(root / "text")), vocabulary=300, length=32)
    lines = []
    return prepare_documents(settings, root / "cache", lines.append), settings, root, lines


def ignore(text):
    pass


def test_all_documents_are_in_one_split_each_with_an_end_token(data):
    tokens, settings, _, lines = data
    kept = read_folder(settings.corpus, ignore)[None]
    written = {name: tokens.tokenizer.decode(ids.tolist()).split(END)[:-1] for name, ids in tokens.splits.items()}
    assert sorted(written[TRAIN] + written[VALID]) == sorted(kept)
    assert sum(map(len, written[VALID])) >= HELD_OUT_SHARE * sum(map(len, kept))
    assert tokens.counts == {name: len(ids) for name, ids in tokens.splits.items()}
    assert len(tokens.tokenizer) == 300
    assert tokens.splits[TRAIN].dtype == np.uint16
    assert lines[1].startswith("40 documents; dropped: 0 repeated documents, and 0 training paragraphs")
    assert f"prepared train {len(written[TRAIN])} documents" in lines[2]
    assert f"{len(tokens.splits[VALID]):,} tokens" in lines[2]


def test_the_cache_is_used_again_and_not_for_changed_text(data, tmp_path):
    _, settings, root, _ = data
    lines = []
    prepare_documents(settings, root / "cache", lines.append)
    assert lines == []
    folder = write_folder(tmp_path / "text", 3)
    changed = settings.model_copy(update={"corpus": str(folder)})
    before = folder_of_documents(changed, root)
    (folder / "new.txt").write_text("more")
    assert folder_of_documents(changed, root) != before


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_every_text_comes_back_and_has_no_special_token(data, text):
    tokenizer = data[0].tokenizer
    for each in (text, f"{text}{END}{text}", "<pad>"):
        (ids,) = encode_all(tokenizer, [each])
        assert not {0, END_ID} & set(ids)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == each
        assert token_bytes(tokenizer)[ids].sum() == len(each.encode())


def test_files_named_by_split_are_used_as_such_in_all_formats(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.txt").write_text("\ufeffone\r\ntwo")
    (tmp_path / "train.jsonl").write_text("\ufeff" + json.dumps({"text": "three", "id": 1}) + "\n\n")
    pq.write_table(pa.table({"text": ["four", None]}), tmp_path / "train-0.parquet")
    (tmp_path / "dev.md").write_text("five")
    (tmp_path / "test_a.rst").write_text("six")
    (tmp_path / "testing.md").write_text("seven")
    (tmp_path / ".train.txt").write_text("eight")
    (tmp_path / "train.txt.gz").write_bytes(b"nine")
    lines = []
    found = read_folder(str(tmp_path), lines.append)
    assert found == {TRAIN: ["one\ntwo", "four", "three"], VALID: ["five"], TEST: ["six"]}
    assert lines == [
        f"ignored in {tmp_path}: 1 hidden files and folders (.train.txt)",
        f"ignored in {tmp_path}: 1 files that are not .txt, .md, .rst, .jsonl, .parquet (train.txt.gz)",
        f"dropped 1 empty documents of {tmp_path}",
        f"1 documents of {tmp_path} are not used: their files are named neither train, valid nor test",
    ]


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    (tmp_path / "a.txt").symlink_to("gone")
    with pytest.raises(DataError, match=r"a\.txt is neither a file nor a link to one; remove it"):
        prepare_documents(DocumentSettings(corpus=str(tmp_path)), tmp_path / ".cache", ignore)


def test_what_crosses_splits_is_dropped_from_training_only():
    shared, heading = "A paragraph of more than forty characters, twice.", "Short heading"
    by_split = {
        TRAIN: [f"{heading}\n\nOwn text of the first.\n\n{shared.replace(' ', '  ')}", "Own", "Own", shared],
        VALID: [f"{heading}\n\n{shared}"],
    }
    lines = []
    parts = split(by_split, lines.append)
    assert parts == {TRAIN: [f"{heading}\n\nOwn text of the first.", "Own"], VALID: by_split[VALID]}
    assert "5 documents; dropped: 1 repeated documents, and 2 training paragraphs" in lines[0]
    parts = split({TRAIN: ["make clean", "make all"], VALID: ["make clean"]}, lines.append)  # short, and whole
    assert parts == {TRAIN: ["make all"], VALID: ["make clean"]}
    assert "3 documents; dropped: 1 repeated documents, and 0 training paragraphs" in lines[1]


def test_the_same_documents_are_held_out_in_any_order_and_few_documents_lose_their_ends():
    texts = [document(seed) for seed in range(100)]
    one, other = (split({None: each}, ignore) for each in (texts, texts[::-1]))
    assert set(one[VALID]) == set(other[VALID])
    assert set(one[TRAIN]) | set(one[VALID]) == set(texts)
    assert 0.05 <= sum(map(len, one[VALID])) / sum(map(len, texts)) <= 0.075
    book, lines = document(1, 50), "\n".join(document(2, 40).split("\n\n"))
    parts = split({None: [book, lines]}, ignore)
    for whole, joint, begin, end in zip((book, lines), ("\n\n", "\n"), parts[TRAIN], parts[VALID], strict=True):
        assert f"{begin}{joint}{end}" == whole
        assert 0.05 <= len(end) / len(whole) < 0.1


@pytest.mark.slow
def test_docstrings_are_prose_without_markup():
    documents = read_docstrings(DJANGO, None, ignore)
    text = "\n\n".join(documents)
    assert len(documents) > 100
    assert len(text) > 200_000
    assert "``" not in text
    assert ">>>" not in text
    paragraphs = [part for each in documents for part in each.split("\n\n")]
    assert len(set(paragraphs)) == len(paragraphs)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"has no text \(0 files \.txt, \.md"),
        ({"a.txt": b"caf\xe9"}, r"a.txt is not UTF-8 \(line 1, byte 3: "),
        ({"a.parquet": b"no"}, "a.parquet cannot be read"),
        ({"a.parquet": {"text": [1, 2]}}, "its column text has values of type int64, not strings"),
        ({"a.parquet": {"body": ["words"]}}, "it has the columns body, and none is called text"),
        ({"train.txt": b"some text"}, "has train files but no valid or test files with text"),
        ({"a.txt": b"one line only"}, "has no valid text"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_in_a_sentence(tmp_path, files, message):
    for name, content in files.items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            pq.write_table(pa.table(content), tmp_path / name)
    with pytest.raises(DataError, match=message):
        prepare_documents(DocumentSettings(corpus=str(tmp_path)), tmp_path / ".cache", ignore)


def test_a_vocabulary_that_the_text_cannot_fill_is_said(data):
    _, settings, root, _ = data
    said = []
    prepare_documents(settings.model_copy(update={"vocabulary": 9999}), root / "cache", said.append)
    assert re.search(r"text\.vocabulary is 9999, and the text gives \d{3,4} entries: others stay unused", str(said))


def test_too_short_a_text_too_small_a_vocabulary_and_an_unknown_corpus_are_refused(data):
    _, settings, root, _ = data
    with pytest.raises(DataError, match=r"train of .* tokens, and a row needs 100001: text\.length and the next token"):
        prepare_documents(settings.model_copy(update={"length": 100_000}), root / "cache", ignore)
    with pytest.raises(SettingError, match=r"text\.vocabulary is 257, and 2 special tokens and 256 bytes need 258"):
        prepare_documents(settings.model_copy(update={"vocabulary": 257}), root / "cache", ignore)
    with pytest.raises(DataError, match="no corpus 'docstring'; did you mean docstrings"):
        prepare_documents(settings.model_copy(update={"corpus": "docstring"}), root / "cache", ignore)
