"""Holds out whole documents, and drops from the training documents what the held-out ones say too.

documents  A B C D ... Z       20 or more: some whole documents are held out
documents  A B                 fewer: the last paragraphs of each
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b

from suite.data.documents.folder import TRAIN, VALID
from suite.log import Log

HELD_OUT_SHARE = 0.05
"""Share of the characters that is held out."""
FEWEST_DOCUMENTS = 20
_SHORTEST_REPEAT = 40
"""Characters of a paragraph that counts as repeated; a heading may occur in any document."""
_PARAGRAPH = re.compile(r"\n\s*\n")


def split(by_split: dict[str | None, list[str]], log: Log) -> dict[str, list[str]]:
    """Returns the documents of each split; holds some out if they come without splits. Logs what is dropped.

    A document that another one repeats is dropped, as is each training paragraph of 40 characters or more that a
    held-out document has too.
    """
    read = {name: len(documents) for name, documents in by_split.items()}
    once = {name: list(dict.fromkeys(documents)) for name, documents in by_split.items()}
    parts = _held_out(once[None]) if None in once else {name: once[name] for name in once if name is not None}
    held_out = dict.fromkeys(text for name in parts if name != TRAIN for text in parts[name])
    trained = [text for text in parts[TRAIN] if text not in held_out]
    known = {_key(part) for text in held_out for part in _PARAGRAPH.split(text)} - {""}
    train, paragraphs, characters = [], 0, 0
    for text in trained:
        before = _PARAGRAPH.split(text)
        kept = [part for part in before if _key(part) not in known]
        new = "\n\n".join(kept) if len(kept) < len(before) else text
        paragraphs, characters = paragraphs + len(before) - len(kept), characters + len(text) - len(new)
        if new.strip():
            train.append(new)
    repeated = sum(read.values()) - sum(map(len, once.values())) + len(parts[TRAIN]) - len(trained)
    log(
        f"{sum(read.values()):,} documents; dropped: {repeated:,} repeated documents, and {paragraphs:,} training "
        f"paragraphs ({characters:,} characters) that held-out documents have too"
    )
    return {**parts, TRAIN: train}


def _held_out(documents: list[str]) -> dict[str, list[str]]:
    total = sum(map(len, documents))
    if len(documents) < FEWEST_DOCUMENTS:
        pairs = [_without_end(text) for text in documents]
        return {TRAIN: [begin for begin, _ in pairs if begin], VALID: [end for _, end in pairs if end]}
    chosen: set[str] = set()
    size = 0
    for text in sorted(documents, key=_order):
        if size + len(text) <= 1.5 * HELD_OUT_SHARE * total:  # no huge document
            chosen.add(text)
            size += len(text)
        if size >= HELD_OUT_SHARE * total:
            break
    train = [text for text in documents if text not in chosen]
    return {TRAIN: train, VALID: [text for text in documents if text in chosen]}


def _order(text: str) -> bytes:
    """Returns a hash of the content: the same documents are held out whatever their names and number."""
    return blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()


def _without_end(text: str) -> tuple[str, str]:
    """Returns a document without its last paragraphs, and these: a twentieth. Without empty lines, a line is one."""
    for separator, joint in ((_PARAGRAPH, "\n\n"), (re.compile("\n"), "\n")):
        parts = separator.split(text)
        if len(parts) > 1:
            at = _cut(parts)
            return joint.join(parts[:at]), joint.join(parts[at:])
    return text, ""


def _cut(parts: Sequence[str]) -> int:
    """Returns the index of the first held-out part: at least the last is held out and the first is not."""
    least = HELD_OUT_SHARE * sum(map(len, parts))
    size = 0
    for at in range(len(parts) - 1, 1, -1):
        size += len(parts[at])
        if size >= least:
            return at
    return 1


def _key(paragraph: str) -> str:
    """Returns the paragraph with single blanks; empty for a short one, which is no repetition."""
    text = " ".join(paragraph.split())
    return text if len(text) >= _SHORTEST_REPEAT else ""
