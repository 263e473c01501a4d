"""Language codes: one name per language for all catalogues' codes.

de_AT -> de    zh_TW -> zh_Hant    sr@latin -> sr_Latn    pt-BR -> pt_BR    en_GB -> None (the source language)
"""

from __future__ import annotations

import re
from functools import cache

# variants with another script or another written standard than their base language
_NAMED = {
    "no": "nb",
    "fu": "fur",
    "pt_br": "pt_BR",
    "pa_pk": "pa_Arab",
    "yue_hant": "yue",
    "zh": "zh_Hans",
    "zh_cn": "zh_Hans",
    "zh_sg": "zh_Hans",
    "zh_hk": "zh_Hant",
    "zh_mo": "zh_Hant",
    "zh_tw": "zh_Hant",
}
_SCRIPTS = {"latn": "Latn", "latin": "Latn", "hans": "Hans", "hant": "Hant", "arab": "Arab"}
_NATIVE = {"cyrl", "cyrillic"}  # used for Serbian, whose plain code means Cyrillic anyway


@cache
def canonical(code: str) -> str | None:
    """Returns the suite's name of a language code, or None for English and for anything that is no language code."""
    plain = re.sub(r"[-@.]", "_", code.strip()).casefold()
    if plain in _NAMED:
        return _NAMED[plain]
    base, *rest = plain.split("_")
    if base == "en" or not re.fullmatch(r"[a-z]{2,3}", base):
        return None
    script = next((_SCRIPTS[part] for part in rest if part in _SCRIPTS), None)
    if script and not _NATIVE & set(rest):
        return f"{base}_{script}"
    return _NAMED.get(base, base)
