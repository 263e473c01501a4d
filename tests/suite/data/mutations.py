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
from tests.suite.data.text.pair_files import KINDS, write_pairs

ANIMALS = ["cat", "dog", "cow", "hen", "fox", "owl"]
PAIRS = [(f"The {ANIMALS[at % 6]} number {at} runs", f"Das Tier {ANIMALS[at % 6]} Nummer {at} läuft")
         for at in range(60)]  # fmt: skip

Write = Callable[[Path, random.Random], None]


def write_parallel(folder: Path, chosen: random.Random) -> None:
    """Writes pairs in one of the formats, sometimes with held-out files, sometimes in two formats."""
    parts = {"train": PAIRS} if chosen.random() < 0.5 else {
        "train": PAIRS[:50], chosen.choice(["valid", "dev"]): PAIRS[50:54], "test": PAIRS[54:]}  # fmt: skip
    for split, pairs in parts.items():
        write_pairs(folder, split, pairs, chosen.choice([*KINDS, "lines.gz"]))


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
    name = chosen.choice(["utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "shift_jis", "utf-7"])
    _rewrite(path, lambda data: data.decode(errors="replace").encode(name, errors="replace"))


def line_ends(path: Path, chosen: random.Random) -> None:
    """Other line ends, or separators within lines."""
    end = chosen.choice([b"\r\n", b"\r", b"\xe2\x80\xa8", b"\n\n", b"\x0c", b"\x85", b"\n\r", b""])
    _rewrite(path, lambda data: data.replace(b"\n", end))


MARK = b"\xef\xbb\xbf"
ODD = [MARK, MARK, 2 * MARK, b"\0", b"\0" * 5000, b"\xff", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x1b[31m",
       b"Wort" * 50_000]  # fmt: skip
"""Marks of a byte order, bytes that no text has, and a word of more characters than the csv module's limit."""


def bytes_put_in(path: Path, chosen: random.Random) -> None:
    """One of ``ODD`` at the begin or anywhere."""
    what, at = chosen.choice(ODD), chosen.choice([0, 0, chosen.random()])
    _rewrite(path, lambda data: data[: int(at * len(data))] + what + data[int(at * len(data)) :])


def flipped(path: Path, chosen: random.Random) -> None:
    """Some bytes of the file as it is on the disk."""
    data = bytearray(path.read_bytes())
    for _ in range(chosen.choice([1, 3, 30]) if data else 0):
        data[chosen.randrange(len(data))] = chosen.randrange(256)
    path.write_bytes(bytes(data))


def truncated(path: Path, chosen: random.Random) -> None:
    """A file whose copy was interrupted."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * chosen.choice([0, 0.02, 0.5, 0.9, 0.99]))])


JSON = [
    "null", "5", "[]", "{}", '"text"', "NaN", '{"text": null}', '{"text": 5}', '{"text": ["a"]}', "{", "[" * 100_000,
    '{"text": {"en": "a"}}', '{"text": "\\ud83d"}', '{"de": "\\ud800", "en": "cat"}', '{"de": 5, "en": "cat"}',
    '{"de": null, "en": "cat"}', '{"de": "a"}', '{"translation": null}', '{"translation": [1]}', '{"text": "\\u0000"}',
    '{"translation": {"de": "\\udfff", "en": "A lone one"}}', f'{{"text": {"9" * 5000}, "de": 1e999, "en": "a"}}',
    '{"DE": "a", "EN": "b"}', '{"text": ""}', "// comment", '{"text": "a", "text": 5}', '{"source": "a"}',
]  # fmt: skip


def lines_changed(path: Path, chosen: random.Random) -> None:
    """A line that is missing, empty, twice there, quoted or JSON of another type; a column more or less."""
    kind = chosen.randrange(12)

    def change(data: bytes) -> bytes:
        lines = data.split(b"\n")
        at = chosen.randrange(len(lines))
        line = lines[at]
        new = [[], [b""], [line, line], [b'"' + line + b'"'], [line + b"\tmore"], [line.replace(b"\t", b" ")],
               [b'"' + line], [b"<seg>", line]]  # fmt: skip
        lines[at : at + 1] = new[kind] if kind < len(new) else [chosen.choice(JSON).encode(), line]
        return b"\n".join(lines)

    _rewrite(path, change)


HIDDEN = [".DS_Store", "._{}", ".{}.swp", ".ipynb_checkpoints/{}", ".git/HEAD", ".gitkeep", ".{}"]
VISIBLE = [
    "README.md", "train.es_419-en.tsv", "train.fr-en.fr.gz", "train.en-en.tsv", "corpus.de", "train.en", "dev.tsv",
    "europarl-v7.de-en.de", "train.de-en.tmx", "train.de-en.en", "train.spm", "Thumbs.db", "train.csv", "labels.txt",
    "train.de-en.tsv.bak", "train.json", "train.jsonl", "train.txt.gz", "1.svg", "train", "train.en-de.tsv",
    "train.de-en.jsonl.gz", "TRAIN.de-en.tsv", "train.x-en.tsv", "test.de-en.de", "train.fr-en.tsv.zst", "train~",
    "__MACOSX/._a", "train.de-en.parquet", "image.webp", "a.txt", "train.de-fr.tsv", "new/cat.png",
]  # fmt: skip


def beside(path: Path, chosen: random.Random) -> None:
    """What a desktop, a notebook or an editor leaves beside a file, or files with names of the field."""
    other = path.parent / chosen.choice([chosen.choice(HIDDEN).format(path.name), chosen.choice(VISIBLE)])
    if not other.exists():
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(chosen.choice([path.read_bytes(), b"The cat\tDie Katze\n", b"\0\x05\x16\x07\0\xff", b""]))


def replaced(path: Path, chosen: random.Random) -> None:
    """A link or a folder in the place of a file, another name, or a copy; compressed under the old name or not at all
    under the new one."""
    kind = chosen.choice(["link", "folder", "upper", "copy", "compressed", "gz"])
    if kind in ("link", "folder"):
        path.unlink()
        path.mkdir() if kind == "folder" else path.symlink_to(path.parent / "gone")
    elif kind == "copy":
        shutil.copy(path, path.with_name(f"{path.stem} copy{path.suffix}"))
    elif kind == "compressed":
        path.write_bytes(gzip.compress(path.read_bytes()))
    else:
        path.rename(path.with_name(path.name.upper() if kind == "upper" else f"{path.name}.gz"))


def picture(path: Path, chosen: random.Random) -> None:
    """An image of another mode, size or format, or a truncated one."""
    if path.suffix not in (".png", ".jpg", ".bmp", ".gif"):
        return
    mode, size = (
        chosen.choice(["1", "L", "P", "RGB", "RGBA", "CMYK", "I", "F", "I;16", "LA"]),
        chosen.choice([1, SIZE, 40]),
    )
    pixels = np.random.default_rng(chosen.randrange(99)).integers(0, 256, (size, size)).astype(np.uint8)
    kinds = {"RGBA": "webp", **dict.fromkeys(("F", "I", "I;16", "CMYK", "1"), "tiff")}
    Image.fromarray(pixels).convert("L" if mode == "I;16" else mode).save(path, kinds.get(mode, "png"))
    if chosen.random() < 0.3:
        truncated(path, chosen)


CHANGES = [encoding, line_ends, bytes_put_in, bytes_put_in, flipped, truncated, lines_changed, lines_changed, beside,
           beside, replaced, replaced, picture]  # fmt: skip
