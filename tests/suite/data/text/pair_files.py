"""Writes sentence pairs in the formats of a user's own folder."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

KINDS = ("lines", "tsv", "jsonl", "parquet")


def write_pairs(
    folder: Path, split: str, pairs: list[tuple[str, str]], kind: str = "lines", code: str = "de", head: bytes = b""
) -> None:
    """Writes (English, translation) pairs of a split; ``kind`` ends with .gz for compressed files, which begin with
    ``head``."""
    rows = [{"en": english, code: other} for english, other in pairs]
    name, (kind, _, suffix) = f"{split}.{code}-en", kind.partition(".")
    if kind == "parquet":
        pq.write_table(
            pa.table({side: [row[side] for row in rows] for side in ("en", code)}), folder / f"{name}.parquet"
        )
        return
    texts = {side: "".join(f"{row[side]}\n" for row in rows) for side in ("en", code)}
    if kind == "tsv":
        texts = {"tsv": "".join(f"{other}\t{english}\n" for english, other in pairs)}
    elif kind == "jsonl":  # both layouts
        texts = {
            "jsonl": "".join(json.dumps(row if at else {"translation": row}) + "\n" for at, row in enumerate(rows))
        }
    for ending, text in texts.items():
        data = head + text.encode()
        path = folder / f"{name}.{ending}{'.gz' if suffix else ''}"
        path.write_bytes(gzip.compress(data) if suffix else data)
