"""One vocabulary for all languages: SentencePiece-style pieces in a ``transformers`` tokenizer.

    id  0      1      2    3     4 ...            then              then
        <pad>  <unk>  <s>  </s>  <2af> ... <2zh>  256 single bytes  pieces, in the order they were learned

A character outside the alphabet is encoded as its UTF-8 bytes, so no text is unknown, and decoding returns the encoded
text, NFKC-normalised.

The pieces come from byte-pair merges and not from a unigram model, because merges are equal on every run and machine:
ids in a checkpoint must stay valid when the text is prepared again. (Unigram pieces differ from run to run, take four
times as long to learn and give 2% more tokens on this text.)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from suite.data.text.cleaning import Sentences
from suite.data.text.sampling import temperature_weights
from suite.errors import SettingError

PAD, UNKNOWN, BEGIN, END = "<pad>", "<unk>", "<s>", "</s>"
SPECIAL = (PAD, UNKNOWN, BEGIN, END)
PAD_ID, UNKNOWN_ID, BEGIN_ID, END_ID = range(4)
ENGLISH = "en"
BYTES = tuple(f"<0x{value:02X}>" for value in range(256))

_FEWEST_PIECES = 64
_TEXTS_AN_ENTRY = 5  # training texts per entry; more texts change the pieces little and cost seconds
MOST_TEXTS = 100_000
_ENGLISH_SHARE = 0.25  # of these texts; English is half of the training text, but one language of a hundred
TEMPERATURE = 5.0  # of this sample; separate from text.temperature, so that changing that keeps the prepared text
_COVERAGE = 0.9998  # of the sample's characters; the rest are encoded as bytes
_ALPHABET_SHARE = 0.4  # largest share of single characters among the pieces; otherwise Han and Hangul would take all
_LONGEST_PIECE = 16  # characters
_SPACE = "\u2581"


def language_token(language: str) -> str:
    """Returns the token that tells the model which language to write: ``<2de>``, ``<2pt_BR>``."""
    return f"<2{language}>"


def train_tokenizer(
    sentences: Sentences, vocabulary: int, sizes: Mapping[str, int] | None = None
) -> PreTrainedTokenizerFast:
    """Learns the pieces from a temperature-weighted sample of ``sentences``; the result has ``vocabulary`` entries, or
    as many as the text gives. ``sizes`` are the numbers of pairs of each language if ``sentences`` has only some.

    Raises SettingError when the vocabulary cannot hold the special tokens, the bytes and a few pieces.
    """
    languages = sorted({ENGLISH, *sentences})
    fixed = [*SPECIAL, *map(language_token, languages), *BYTES]
    needed = len(fixed) + _FEWEST_PIECES
    if vocabulary < needed:
        raise SettingError(
            f"text.vocabulary is {vocabulary}, but {len(languages)} languages need at least {needed} entries "
            f"({len(SPECIAL)} special, one per language, {len(BYTES)} bytes, {_FEWEST_PIECES} pieces); "
            f"set text.vocabulary={needed} or more"
        )
    count = min(MOST_TEXTS, _TEXTS_AN_ENTRY * vocabulary)
    pieces, merges = _learn(_sample(sentences, count, sizes), vocabulary - len(fixed))
    ids = {token: i for i, token in enumerate([*fixed, *pieces])}
    tokenizer = _pipeline(models.BPE(vocab=ids, merges=merges, unk_token=UNKNOWN, byte_fallback=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        bos_token=BEGIN,
        eos_token=END,
        extra_special_tokens=[language_token(language) for language in languages],
        clean_up_tokenization_spaces=False,
    )


def _pipeline(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(replacement=_SPACE, prepend_scheme="always")]
    )
    return tokenizer


def _spread(texts: Sequence[str], count: int) -> list[str]:
    """Returns ``count`` evenly spaced texts, or all if there are fewer."""
    step = max(1.0, len(texts) / max(1, count))
    return [texts[int(i * step)] for i in range(min(count, len(texts)))]


def _sample(sentences: Sentences, count: int, sizes: Mapping[str, int] | None) -> list[str]:
    sizes = {language: size for language, size in (sizes or {}).items() if size} or {
        language: len(pairs) for language, pairs in sentences.items() if pairs
    }
    texts = _spread(
        sorted({english for pairs in sentences.values() for english, _ in pairs}), round(count * _ENGLISH_SHARE)
    )
    weights = temperature_weights(list(sizes.values()), TEMPERATURE)
    for language, weight in zip(sizes, weights, strict=True):
        wanted = round(count * (1 - _ENGLISH_SHARE) * float(weight))
        texts += _spread([translation for _, translation in sentences[language]], wanted)
    return texts


def _alphabet(texts: Iterable[str], limit: int) -> set[str]:
    """Returns the most frequent characters: enough for the coverage, at most ``limit``."""
    counts = Counter("".join(texts))
    counts[_SPACE] = counts.pop(" ", 0) + 1
    uncovered = _COVERAGE * counts.total()
    chosen: set[str] = set()
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:limit]:
        if uncovered <= 0:
            break
        chosen.add(character)
        uncovered -= count
    return chosen | {_SPACE}


def _learn(texts: Sequence[str], count: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns up to ``count`` pieces in the order they were learned, and their merges."""
    learner = _pipeline(models.BPE())
    texts = [learner.normalizer.normalize_str(text) for text in texts]  # its characters are those that are learned
    alphabet = _alphabet(texts, int(count * _ALPHABET_SHARE))
    rare = {ord(character): " " for character in set("".join(texts)) - alphabet}
    trainer = trainers.BpeTrainer(vocab_size=count, max_token_length=_LONGEST_PIECE, show_progress=False)
    learner.train_from_iterator((text.translate(rare) for text in texts), trainer)
    learned = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=lambda piece: learned["vocab"][piece])
    return pieces, [(left, right) for left, right in learned["merges"]]
