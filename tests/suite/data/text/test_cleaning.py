"""Each thing that is cleaned, on the smallest text that shows it, and on Django's as a whole."""

from __future__ import annotations

from unicodedata import normalize

import pytest

from suite.data.text.cleaning import Sentences, clean, placeholders, plain, without_marks

RUSSIAN = [("ru", "Save", "Сохранить"), ("ru", "Open", "Открыть"), ("ru", "Close the file", "Закрыть файл")]


@pytest.mark.parametrize(
    ("raw", "clear"),
    [
        ("<b>Bold</b> and <a href='%(url)s'>link</a>", "Bold and link"),
        ("one<br/>two", "one two"),
        ("a &amp; b&nbsp;c &unknown d", "a & b c &unknown d"),
        ("  two\n  lines ", "two lines"),
        ("\ufb01ne\u200b \u2026", "fine ..."),  # a ligature, an invisible space, an ellipsis
        ("2 < 3", "2 < 3"),
    ],
)
def test_markup_and_odd_characters_go(raw: str, clear: str):
    assert plain(raw) == clear


def test_placeholders_are_found_whatever_their_kind():
    text = "%s of %(count)d: {name} {0} ${url} {{x}} 100% sure, 5% done %1$s"
    assert placeholders(text) == tuple(sorted(["%s", "%(count)d", "{name}", "{0}", "${url}", "{{x}}", "%1$s"]))


@pytest.mark.parametrize(
    ("pair", "clear"),
    [
        (("_File", "_Datei"), ("File", "Datei")),
        (("Sa_ve", "文件(_S)"), ("Save", "文件")),
        (("&Open", "&Öffnen"), ("Open", "Öffnen")),
        (("R&D costs", "R&D Kosten"), ("R&D costs", "R&D Kosten")),
        (("_Add %(first_name)s", "%(first_name)s _neu"), ("Add %(first_name)s", "%(first_name)s neu")),
        (("Edit file_name", "file_name ändern"), ("Edit file_name", "file_name ändern")),
    ],
)
def test_accelerators_go_and_names_stay(pair: tuple[str, str], clear: tuple[str, str]):
    assert without_marks(*pair) == clear


@pytest.mark.parametrize(
    "bad",
    [
        ("ru", "Delete %s", "Удалить"),  # a placeholder lost
        ("ru", "Delete", "Удалить %s"),  # or gained
        ("ru", "Server", "Server"),  # untranslated
        ("ru", "SERVER", "server"),
        ("ru", "Server", "Serveur"),  # another script
        ("ru", "Server", "服务器"),
        ("ru", "label_server_name", "Сервер"),  # a key
        ("ru", "%(a)s: %(b)s", "%(b)s: %(a)s"),  # no word
        ("ru", "Server", ""),
        ("ru", "Server", "<b></b>"),
    ],
)
def test_unusable_pairs_are_left_out(bad: tuple[str, str, str]):
    assert clean([*RUSSIAN, bad], fewest=1) == clean(RUSSIAN, fewest=1)


def test_a_latin_name_in_another_script_stays():
    assert ("Use SSH", "Через SSH") in clean([*RUSSIAN, ("ru", "Use SSH", "Через SSH")], fewest=1)["ru"]


def test_repeats_count_once_and_small_languages_are_left_out():
    assert clean(RUSSIAN * 2, fewest=3) == {"ru": sorted((e, t) for _, e, t in RUSSIAN)}
    assert clean(RUSSIAN, fewest=4) == {}


def test_django_comes_out_clean(sentences: Sentences):
    pairs = [(english, translation) for found in sentences.values() for english, translation in found]
    assert len(sentences) > 80
    assert len(pairs) > 50_000
    assert {"pt_BR", "zh_Hans", "zh_Hant", "sr", "sr_Latn"} <= set(sentences)
    assert not [code for code in sentences if code.startswith("en")]
    for english, translation in pairs:
        assert placeholders(english) == placeholders(translation)
        assert normalize("NFKC", translation) == translation
        assert english.casefold() != translation.casefold()
