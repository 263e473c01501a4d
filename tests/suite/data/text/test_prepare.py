"""The cache: used when valid, rebuilt when damaged, safe when two prepare at once, django without network."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from suite.data import cache as caching
from suite.data.cache import find_damage
from suite.data.packages import UnreachableError, fetch_wheels
from suite.data.text import prepare as module
from suite.data.text.catalogues import REQUIREMENTS
from suite.data.text.prepare import folder_of, prepare
from suite.data.text.splitting import TEST, TRAIN
from suite.data.text.text import TextData
from suite.errors import DataError, SettingError
from suite.settings import TextSettings
from tests.suite.data.text.pair_files import write_pairs


@pytest.fixture
def own_cache(data: TextData, cache: Path, settings: TextSettings, tmp_path: Path) -> Path:
    shutil.copytree(folder_of(settings, cache), folder_of(settings, tmp_path))
    return tmp_path


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")


def test_prepared_text_is_used_again(own_cache: Path, settings: TextSettings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_build", lambda *_: pytest.fail("built again"))
    said: list[str] = []
    again = prepare(settings, own_cache, said.append)
    assert again.corpus == "django"
    assert len(again.tokenizer) == settings.vocabulary
    assert sum(again.pairs.values()) == len(again.splits["train"]) > 40_000
    assert all(Path(file["filename"]).is_relative_to(own_cache) for file in again.splits["train"].cache_files)


def test_whoever_does_not_ask_for_the_test_pairs_gets_none(data: TextData, settings, cache) -> None:
    """Training, validation and tuning do not ask."""
    assert data.token_ids(TEST, [0])
    without = TextData(folder_of(settings, cache))
    assert without.token_ids(TRAIN, [0])
    for read in (without.token_ids, without.texts):
        with pytest.raises(KeyError):
            read(TEST, [0])


def test_rows_lie_together_by_language(data: TextData):
    at = data.languages.index("el")
    for name, sizes in data.sizes.items():
        begin, end = sum(sizes[:at]), sum(sizes[: at + 1])
        translations = [data.tokenizer.decode(ids) for _, ids in data.token_ids(name, range(sum(sizes)))]
        greek = [row for row, each in enumerate(translations) if re.search("[\u03b1-\u03c9]", each)]
        assert sum(begin <= row < end for row in greek) > 0.95 * (end - begin)
        assert sum(not begin <= row < end for row in greek) < 0.01 * sum(sizes)  # a formula has a letter


def test_ids_of_a_small_vocabulary_take_two_bytes(data: TextData):
    for rows in data.splits.values():
        assert {str(rows.features[side].feature.dtype) for side in ("english", "translation")} == {"uint16"}


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda f: _flip(f / "train/data-00000-of-00001.arrow"), r"train/data-00000-of-00001\.arrow does not have"),
        (lambda f: (f / "tokenizer/tokenizer.json").write_text("{}"), r"tokenizer/tokenizer\.json has 2 bytes"),
        (lambda f: (f / "text.json").unlink(), r"text\.json is missing"),
        (lambda f: (f / "manifest.json").unlink(), r"manifest\.json is missing"),
        (lambda f: (f / "manifest.json").write_text("{"), r"manifest\.json cannot be read"),
        (lambda f: (f / "test/more").write_text(""), r"test/more is not in manifest"),
    ],
)
def test_damage_is_named(own_cache: Path, settings: TextSettings, harm, named: str):
    folder = folder_of(settings, own_cache)
    assert find_damage(folder) is None
    harm(folder)
    assert re.search(named, find_damage(folder) or "")


@pytest.mark.slow
def test_a_damaged_cache_is_not_used_but_built_again(own_cache: Path, settings: TextSettings, data: TextData):
    folder = folder_of(settings, own_cache)
    _flip(folder / "text.json")
    said: list[str] = []
    again = prepare(settings, own_cache, said.append)
    assert str(folder) in said[0]
    assert "damaged (text.json" in said[0]
    assert find_damage(folder) is None
    assert again.sizes == data.sizes
    assert again.digest == data.digest
    assert [again.splits["valid"][i] for i in range(50)] == [data.splits["valid"][i] for i in range(50)]
    assert not list(own_cache.glob("*building*"))


def test_settings_that_change_the_text_change_its_place(settings: TextSettings, tmp_path: Path):
    changes = [{}, {"vocabulary": 1300}, {"max_length": 24}, {"corpus": "catalogues"}]
    assert len({folder_of(settings.model_copy(update=change), tmp_path) for change in changes}) == len(changes)
    assert folder_of(settings.model_copy(update={"temperature": 1.0}), tmp_path) == folder_of(settings, tmp_path)


def test_a_held_lock_has_a_deadline(tmp_path: Path, settings: TextSettings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(caching, "_LOCK_SECONDS", 0.2)
    with (
        caching.filelock.FileLock(folder_of(settings, tmp_path).with_suffix(".lock"), is_singleton=False),
        pytest.raises(DataError, match="another process has been preparing"),
    ):
        prepare(settings, tmp_path, print)


@pytest.mark.usefixtures("no_network")
def test_without_network_django_takes_the_place_of_catalogues_and_that_is_said(own_cache: Path, settings: TextSettings):
    said: list[str] = []
    text = prepare(settings.model_copy(update={"corpus": "catalogues"}), own_cache, said.append)
    assert text.corpus == "django"
    spoken = [line for line in said if "using the smaller corpus" in line]
    assert len(spoken) == 1
    assert "cannot fetch catalogues: pip could not fetch" in spoken[0]
    assert "\n" not in spoken[0]


@pytest.mark.usefixtures("no_network")
def test_a_damaged_package_is_named_and_not_used(tmp_path: Path):
    (tmp_path / "django-5.2.19-py3-none-any.whl").write_bytes(b"half of it")
    said: list[str] = []
    with pytest.raises(UnreachableError):
        fetch_wheels(tmp_path, REQUIREMENTS, "catalogues", said.append)
    assert "django-5.2.19-py3-none-any.whl does not match its hash" in said[0]
    assert not list(tmp_path.glob("*.whl"))


def test_an_unknown_corpus_gets_the_nearest_names(tmp_path: Path):
    with pytest.raises(DataError, match=r"no corpus 'catalogs': a folder .*; did you mean catalogues\?"):
        prepare(TextSettings(corpus="catalogs"), tmp_path, print)


def test_a_hub_set_that_cannot_be_read_says_what_to_do(tmp_path: Path):
    with pytest.raises(DataError, match=r"nobody/nothing could not be read from the hub .* set text.corpus=catalogues"):
        prepare(TextSettings(corpus="nobody/nothing"), tmp_path, print)


def test_kept_languages_have_the_split_of_the_whole_corpus_and_a_vocabulary_of_their_own(
    data: TextData, settings: TextSettings, cache: Path
):
    text = settings.model_copy(update={"corpus_languages": ("nl", "es"), "vocabulary": 1100})
    prepare(text, cache, print)
    kept = TextData(folder_of(text, cache), with_test=True)
    assert kept.languages == ("es", "nl")
    assert len(kept.tokenizer) == 1100
    whole, own = ({pair for code in ("es", "nl") for pair in held_out_texts(some, code)} for some in (data, kept))
    assert len(whole) > 200
    assert whole <= own
    for pair in own - whole:  # the vocabulary of 89 languages cuts them into more tokens
        assert max(len(data.tokenizer.encode(text)) for text in pair) > text.max_length - 2
    trained = {english for code in ("es", "nl") for english, _ in held_out_texts(data, code, "valid")}
    assert not trained & {english for english, _ in own}


def held_out_texts(data: TextData, language: str, split: str = "test") -> list[tuple[str, str]]:
    at = data.languages.index(language)
    first = sum(data.sizes[split][:at])
    return data.texts(split, range(first, first + data.sizes[split][at]))


def test_a_kept_language_that_is_not_there_or_a_corpus_of_the_hub_is_an_error(settings: TextSettings, tmp_path: Path):
    write_pairs(tmp_path, "train", [(f"The cat number {at} runs", f"Die Katze Nummer {at} läuft") for at in range(60)])
    with pytest.raises(SettingError, match=r"corpus_languages has xx, which is not one of the 1 languages of /"):
        prepare(settings.model_copy(update={"corpus": str(tmp_path), "corpus_languages": ("xx",)}), tmp_path, print)
    with pytest.raises(SettingError, match=r"is from the Hugging Face hub; set text\.languages"):
        prepare(settings.model_copy(update={"corpus": "some/set", "corpus_languages": ("de",)}), tmp_path, print)
