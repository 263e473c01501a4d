"""Seeded damage to folders of a user's own data: what editors, crawlers, archives and other tools leave there."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.suite.data.documents.writing import document
from tests.suite.data.images.pictures import SIZE, images, write_folder

ANIMALS = ["cat", "dog", "cow", "hen", "fox", "owl"]
PAIRS = [(f"The {ANIMALS[at % 6]} number {at} runs", f"Das Tier {ANIMALS[at % 6]} Nummer {at} läuft")
         for at in range(60)]  # fmt: skip

Write = Callable[[Path, random.Random], None]


def write_pairs(folder: Path, chosen: random.Random) -> None:
    """Writes pairs in one of the formats, sometimes with held-out files, sometimes in two formats."""
    parts = {"train": PAIRS} if chosen.random() < 0.5 else {
        "train": PAIRS[:50], chosen.choice(["valid", "dev"]): PAIRS[50:54], "test": PAIRS[54:]}  # fmt: skip
    for split, pairs in parts.items():
        write_pair_files(folder, split, pairs, chosen.choice(["lines", "tsv", "jsonl", "parquet", "gz"]))


def write_pair_files(folder: Path, split: str, pairs: list[tuple[str, str]], kind: str) -> None:
    """Writes the pairs of a split in one format."""
    english, german = ("".join(f"{pair[side]}\n" for pair in pairs) for side in range(2))
    rows = [{"en": pair[0], "de": pair[1]} for pair in pairs]
    if kind == "lines":
        (folder / f"{split}.de-en.de").write_text(german)
        (folder / f"{split}.de-en.en").write_text(english)
    elif kind == "gz":
        (folder / f"{split}.de-en.de.gz").write_bytes(gzip.compress(german.encode()))
        (folder / f"{split}.de-en.en.gz").write_bytes(gzip.compress(english.encode()))
    elif kind == "tsv":
        (folder / f"{split}.en-de.tsv").write_text("".join("\t".join(pair) + "\n" for pair in pairs))
    elif kind == "jsonl":
        (folder / f"{split}.de-en.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.table({side: [row[side] for row in rows] for side in ("en", "de")}),
                       folder / f"{split}.de-en.parquet")  # fmt: skip


def write_documents(folder: Path, chosen: random.Random) -> None:
    """Writes documents in several formats, sometimes by split."""
    prefixes = [""] if chosen.random() < 0.5 else ["train-", "valid-", "test-"]
    for number, prefix in enumerate(prefixes):
        texts = [document(10 * number + at) for at in range(4)]
        for at, text in enumerate(texts):
            (folder / f"{prefix}{at}.{chosen.choice(['txt', 'md', 'rst'])}").write_text(text)
        lines = "".join(json.dumps({"text": document(10 * number + at)}) + "\n" for at in range(4, 8))
        (folder / f"{prefix}more.jsonl").write_text(lines)
        pq.write_table(pa.table({"text": [document(10 * number + 8)]}), folder / f"{prefix}rows.parquet")


def write_images(folder: Path, chosen: random.Random) -> None:
    """Writes a folder for each class, or the four files of MNIST's layout."""
    if chosen.random() < 0.2:
        write_folder(folder, 16, 8, classes=2)
        return
    for split, count in (("train", 12), *([(chosen.choice(["test", "val"]), 4)] if chosen.random() < 0.5 else [])):
        for at, pixels in enumerate(images(count, 0, classes=2)[0]):
            path = folder / split / ("ant", "bee")[at % 2] / f"{at}.{chosen.choice(['png', 'jpg', 'bmp', 'gif'])}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)


def mutate(folder: Path, chosen: random.Random) -> str:
    """Changes one file of a folder, or adds one beside it. Returns what it did."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        return "nothing"
    path = chosen.choice(files)
    change = chosen.choice(CHANGES)
    change(path, chosen)
    return f"{change.__name__} of {path.relative_to(folder)}"


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Changes a file's content, within its compression."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            path.write_bytes(gzip.compress(change(gzip.decompress(data))))
            return
        except (OSError, EOFError, zlib.error):
            pass
    path.write_bytes(change(data))


def encoding(path: Path, chosen: random.Random) -> None:
    """Another encoding, with or without a mark."""
    name = chosen.choice(["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp1252", "shift_jis", "utf-7"])
    _rewrite(path, lambda data: data.decode(errors="replace").encode(name, errors="replace"))


def mark(path: Path, chosen: random.Random) -> None:
    """One mark, or two, or one in the middle."""
    at = chosen.choice([0, 0, 1, 2])
    _rewrite(
        path, lambda data: b"\xef\xbb\xbf" * max(1, at) + data if at < 2 else data[:40] + b"\xef\xbb\xbf" + data[40:]
    )


def line_ends(path: Path, chosen: random.Random) -> None:
    """Other line ends, or separators within lines."""
    end = chosen.choice([b"\r\n", b"\r", b"\xe2\x80\xa8", b"\n\n", b"\x0c", b"\x85", b"\n\r", b""])
    _rewrite(path, lambda data: data.replace(b"\n", end))


def bytes_put_in(path: Path, chosen: random.Random) -> None:
    """Bytes that no text has."""
    what = chosen.choice(
        [b"\0", b"\0" * 5000, b"\xff", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x1a", b"\x1b[31m", b"\xc0\xaf"]
    )
    at = chosen.random()
    _rewrite(path, lambda data: data[: int(at * len(data))] + what + data[int(at * len(data)) :])


def flipped(path: Path, chosen: random.Random) -> None:
    """Some bytes of the file as it is on the disk."""
    data = bytearray(path.read_bytes())
    for _ in range(chosen.choice([1, 3, 30])):
        if data:
            data[chosen.randrange(len(data))] = chosen.randrange(256)
    path.write_bytes(bytes(data))


def truncated(path: Path, chosen: random.Random) -> None:
    """A file whose copy was interrupted."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * chosen.choice([0, 0.02, 0.5, 0.9, 0.99]))])


def huge_field(path: Path, chosen: random.Random) -> None:
    """A word of more characters than the csv module's limit."""
    at, word = chosen.random(), b"Wort" * 50_000

    def change(data: bytes) -> bytes:
        end = max(1, data.find(b" ", int(at * len(data))))
        return data[:end] + word + data[end:]

    _rewrite(path, change)


def lines_changed(path: Path, chosen: random.Random) -> None:
    """A line that is missing, empty, twice there or quoted; a column more or less."""
    kind = chosen.randrange(8)

    def change(data: bytes) -> bytes:
        lines = data.split(b"\n")
        at = chosen.randrange(len(lines))
        new = [[], [b""], [lines[at], lines[at]], [b'"' + lines[at] + b'"'], [lines[at] + b"\tmore"],
               [lines[at].replace(b"\t", b" ")], [b'"' + lines[at]], [b"<seg>", lines[at]]][kind]  # fmt: skip
        return b"\n".join([*lines[:at], *new, *lines[at + 1 :]])

    _rewrite(path, change)


JSON = [
    "null", "5", "[]", "{}", '"text"', "true", "NaN", "[1, 2]", '{"text": null}', '{"text": 5}', '{"text": ["a"]}', "{",
    '{"text": {"en": "a"}}', '{"text": "\\ud83d"}', '{"text": "a\\udc00b", "x": 1}', '{"de": "\\ud800", "en": "cat"}',
    '{"de": 5, "en": "cat"}', '{"de": ["a"], "en": "cat"}', '{"de": null, "en": "cat"}', '{"de": "a"}', "[" * 100_000,
    '{"translation": null}', '{"translation": "a"}', '{"translation": [1]}', '{"translation": {"de": "a"}}',
    '{"translation": {"de": "\\udfff", "en": "A lone one"}}', '{"de": {"en": "a"}, "en": {}}', '{"text": "\\u0000"}',
    f'{{"text": {"9" * 5000}, "de": {"9" * 5000}, "en": "a"}}', '{"DE": "a", "EN": "b"}', '{"text": ""}', "// comment",
    '{"text": "a", "text": 5}', "[{\"text\": \"a\"}]", '{"de": true, "en": 1e999}', '{"source": "a", "target": "b"}',
]  # fmt: skip


def json_line(path: Path, chosen: random.Random) -> None:
    """A line of JSON with values of other types."""
    line, at = chosen.choice(JSON).encode(), chosen.choice([0, 3])

    def change(data: bytes) -> bytes:
        lines = data.split(b"\n")
        return b"\n".join([*lines[:at], line, *lines[at:]])

    _rewrite(path, change)


def hidden(path: Path, chosen: random.Random) -> None:
    """What a desktop, a notebook, an editor or a version control system leaves beside a file."""
    name = chosen.choice([".DS_Store", f"._{path.name}", f".{path.name}.swp", ".ipynb_checkpoints/" + path.name,
                          ".git/HEAD", ".gitkeep", ".ipynb_checkpoints/x-checkpoint.txt", f".{path.name}"])  # fmt: skip
    other = path.parent / name
    other.parent.mkdir(exist_ok=True)
    if other.is_dir():
        return
    other.write_bytes(chosen.choice([path.read_bytes(), b"\0\x05\x16\x07\0\xff", b""]))


def visible(path: Path, chosen: random.Random) -> None:
    """Files with names of the field beside a file."""
    name = chosen.choice([
        "README.md", "LICENSE", "train.es_419-en.tsv", "train.fr-en.fr.gz", "train.en-en.tsv", "corpus.de", "train.en",
        "train.zh-Hans-en.tsv", "europarl-v7.de-en.de", "train.de-en.tmx", "newstest2014-deen-ref.de.sgm", "dev.tsv",
        "train.de-en.en", "train.spm", "Thumbs.db", "train.csv", "vocab.json", "checksums.md5", "train.de-en.tsv.bak",
        "train.json", "train.jsonl", "train.txt.gz", "labels.txt", "1.svg", "train", "train.fr-en.fr", "desktop.ini",
        "train.en-de.tsv", "train.de-en.jsonl.gz", "TRAIN.de-en.tsv", "train.de_DE-en.tsv", "train.x-en.tsv",
        "test.de-en.de", "train.pt_br-en.tsv", "train.en_GB-de.tsv", "train.fr-en.tsv.zst", "__MACOSX/._a",
        "train.de-en.parquet", "image.webp", "train~", "a.txt", "copy of 1.png", "train.de-fr.tsv", "new/cat.png",
    ])  # fmt: skip
    other = path.parent / name
    if other.exists():
        return
    other.parent.mkdir(exist_ok=True)
    other.write_bytes(chosen.choice([path.read_bytes(), b"The cat\tDie Katze\n", b""]))


def links(path: Path, chosen: random.Random) -> None:
    """A link or a folder in the place of a file."""
    kind = chosen.randrange(4)
    if kind == 0:
        path.unlink()
        path.symlink_to(path.parent / "gone")
    elif kind == 1:
        path.unlink()
        path.mkdir()
    elif kind == 2:
        path.rename(path.with_name(path.name.upper()))
    else:
        shutil.copy(path, path.with_name(f"{path.stem} copy{path.suffix}"))


def compressed(path: Path, chosen: random.Random) -> None:
    """A compressed file under its old name, or its new one; or a plain file under the name of a compressed one."""
    data = path.read_bytes()
    if chosen.random() < 0.5:
        path.write_bytes(gzip.compress(data))
    else:
        path.rename(path.with_name(f"{path.name}.gz"))


def picture(path: Path, chosen: random.Random) -> None:
    """An image of another mode, size or format, or a truncated one."""
    if path.suffix not in (".png", ".jpg", ".bmp", ".gif"):
        return
    mode, size = (
        chosen.choice(["1", "L", "P", "RGB", "RGBA", "CMYK", "I", "F", "I;16", "LA"]),
        chosen.choice([1, SIZE, 40]),
    )
    pixels = np.random.default_rng(chosen.randrange(99)).integers(0, 256, (size, size)).astype(np.uint8)
    image = Image.fromarray(pixels).convert("L" if mode == "I;16" else mode)
    kind = {"F": "tiff", "I": "tiff", "I;16": "tiff", "CMYK": "tiff", "LA": "png", "RGBA": "webp", "1": "tiff"}.get(
        mode, "png"
    )
    image.save(path, kind)
    if chosen.random() < 0.3:
        truncated(path, chosen)


CHANGES = [encoding, mark, line_ends, bytes_put_in, flipped, truncated, huge_field, lines_changed, json_line, hidden,
           visible, visible, links, compressed, picture]  # fmt: skip
