"""Harms a checkpoint's files as a disk, a store, or a hand would; the harm is drawn from a seeded generator."""

import json
import random

SHAPES = (-1, 0, 1, 6, 7, 2**31, 2**40, 2**63, 2**64, 1e300, "6", None, [], {"x": 1}, True)
DTYPES = ("F32", "F64", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "C64", "F4", "X", "", None, 7)


def bytes_harmed(data: bytes, chance: random.Random) -> bytes:
    """Returns other bytes: flipped, cut, grown, moved, repeated, or of nothing but noise."""
    at = chance.randrange(len(data) + 1)
    length = chance.choice((0, 1, 7, len(data), 10**8, 2**40, 2**63, 2**64 - 1))
    harmed = (
        data[:at] + bytes(one ^ 1 << chance.randrange(8) for one in data[at : at + 1]) + data[at + 1 :],
        data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :],
        data[:at],
        data[:at] + chance.randbytes(chance.randrange(1, 40)) + data[at:],
        data[:at] + bytes(len(data[at : at + 64])) + data[at + 64 :],
        data + data[at:],
        chance.randbytes(chance.randrange(200)),
        length.to_bytes(8, "little") + data[8:],
    )
    return chance.choice(harmed)


def header_harmed(data: bytes, chance: random.Random) -> bytes:
    """Returns a safetensors file whose header, still JSON, says something else."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = chance.choice(sorted(header))
    entry = header[name]
    kind = chance.choice(("shape", "dtype", "offsets", "drop", "rename", "extra", "metadata"))
    if kind == "shape":
        entry["shape"] = [chance.choice(SHAPES) for _ in range(chance.randrange(4))]
    elif kind == "dtype":
        entry["dtype"] = chance.choice(DTYPES)
    elif kind == "offsets":
        entry["data_offsets"] = [chance.choice(SHAPES), chance.choice(SHAPES)][: chance.randrange(3)]
    elif kind == "drop":
        del header[name]
    elif kind == "rename":
        header[chance.choice(("value/", "state/x/step", "../../x", "", "value/" + "y" * 5000))] = header.pop(name)
    elif kind == "extra":
        header[chance.choice(("value/z", "other", "__metadata__"))] = chance.choice((entry, {"a": "b"}, 5))
    else:
        header["__metadata__"] = chance.choice(({"a": "b"}, {"a": 1}, [], "x"))
    return sealed(header, data[8 + length :])


def sealed(header, body: bytes) -> bytes:
    """Returns a safetensors file of a header and what follows it."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def manifest_harmed(values: dict, chance: random.Random) -> dict:
    """Returns a manifest's fields with one of them changed, dropped or added."""
    values = json.loads(json.dumps(values))
    odd = chance.choice((None, -1, 0, 3, 2**70, 1.5, "x", [], {}, True, [[]], {"x": None}, "\ud800"))
    kind = chance.choice(("field", "drop", "extra", "file", "bytes", "sha", "more"))
    name = chance.choice(sorted(values))
    file = chance.choice(sorted(values["files"]))
    if kind == "field":
        values[name] = odd
    elif kind == "drop":
        del values[name]
    elif kind == "extra":
        values["more"] = odd
    elif kind == "file":
        values["files"][file] = odd
    elif kind == "bytes":
        values["files"][file]["bytes"] = odd
    elif kind == "sha":
        values["files"][file]["sha256"] = odd
    else:
        values["files"][chance.choice(("layer-0009.safetensors", "../x", "", "good"))] = values["files"].pop(file)
    return values
