"""Catalogues are read whole: plurals, contexts, keyed templates, nested JSON, and damage is named."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

import pytest

from suite.data.text.catalogues import read_catalogues, read_defaults, read_mo
from suite.data.text.languages import canonical
from suite.errors import DataError


def compiled(messages: dict[str, str]) -> bytes:
    """Returns a compiled catalogue, after the format in the GNU gettext manual."""
    texts = [(a.encode(), b.encode()) for a, b in messages.items()]
    header, tables = 28, 28 + 16 * len(texts)
    place, sources, targets, blob = tables, b"", b"", b""
    for table in range(2):
        for pair in texts:
            entry = struct.pack("<2I", len(pair[table]), place + len(blob))
            sources, targets = (sources + entry, targets) if table == 0 else (sources, targets + entry)
            blob += pair[table] + b"\0"
    return (
        struct.pack("<7I", 0x950412DE, 0, len(texts), header, header + 8 * len(texts), 0, 0) + sources + targets + blob
    )


def test_plurals_go_with_the_first_and_the_last_form_and_contexts_are_dropped():
    data = compiled(
        {"": "Content-Type: text/plain; charset=UTF-8\n", "day\0days": "dan\0dana\0danâ", "menu\x04Öpen": "Auf"}
    )
    assert list(read_mo(data, "x.mo")) == [("day", "dan"), ("days", "danâ"), ("Öpen", "Auf")]


@pytest.mark.parametrize("data", [b"", b"msgid", compiled({"a": "b"})[:20], compiled({"a": "b"})[:30]])
def test_a_broken_catalogue_is_named(data: bytes):
    with pytest.raises(DataError, match=r"here/x\.mo"):
        list(read_mo(data, "here/x.mo"))


def test_a_template_gives_the_english_of_its_keys():
    text = '#. Default: "Do it \\"now\\""\n#: here.py:1\nmsgid "label_do"\nmsgstr ""\n\n'
    text += '#. A note\nmsgid "Other"\nmsgstr ""\n'
    assert read_defaults(text) == {"label_do": 'Do it "now"'}


def test_a_wheel_is_read_without_installing_it(tmp_path: Path):
    wheel = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("x/locale/de_AT/LC_MESSAGES/x.mo", compiled({"label_day": "Tag", "Night": "Nacht"}))
        z.writestr("x/locale/en_GB/LC_MESSAGES/x.mo", compiled({"Colour": "Colour"}))
        z.writestr("x/locale/x.pot", '#. Default: "Day"\nmsgid "label_day"\nmsgstr ""\n')
        z.writestr("h/components/sun/translations/en.json", json.dumps({"a": {"b": "Sun", "c": "Only English"}}))
        z.writestr("h/components/sun/translations/fr.json", json.dumps({"a": {"b": "Soleil", "d": "Rien"}}))
    assert set(read_catalogues(wheel)) == {("de", "Day", "Tag"), ("de", "Night", "Nacht"), ("fr", "Sun", "Soleil")}


def test_a_file_that_is_no_wheel_is_refused_by_name(tmp_path: Path):
    (tmp_path / "x.whl").write_bytes(b"no zip file")
    with pytest.raises(DataError, match=r"x\.whl is not a wheel"):
        list(read_catalogues(tmp_path / "x.whl"))


@pytest.mark.parametrize(
    ("code", "name"),
    [
        *[("de", "de"), ("de_AT", "de"), ("es-419", "es"), ("pt_BR", "pt_BR"), ("pt-BR", "pt_BR"), ("pt_PT", "pt")],
        *[("zh_TW", "zh_Hant"), ("zh-Hans", "zh_Hans"), ("zh_CN", "zh_Hans"), ("zh_Hant_HK", "zh_Hant")],
        *[("sr@latin", "sr_Latn"), ("sr@Latn", "sr_Latn"), ("sr_Latn", "sr_Latn"), ("sr@cyrl", "sr"), ("no", "nb")],
        *[("en", None), ("en_GB", None), ("templates", None), ("", None)],
    ],
)
def test_one_name_a_language(code: str, name: str | None):
    assert canonical(code) == name
