"""Settings typed by a person: ``train.steps=50``. Finds the field, knows its type, says what is wrong in a sentence."""

from __future__ import annotations

import re
import shlex
import types
import unicodedata
from collections.abc import Collection, Iterable
from decimal import Decimal
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

from experiments.base.hints import command, option
from suite.errors import SettingError, nearest, shortened
from suite.settings import MicroBatches

_KINDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a text",
    bool: "true or false",
    MicroBatches: "auto or an integer",
}

OTHER_NAMES = {
    "optimizer.learning_rate": "lr",
    "optimizer.warmup_steps": "warmup num_warmup_steps warmup_ratio",
    "optimizer.lr_decay": "scheduler lr_scheduler lr_scheduler_type",
    "optimizer.max_grad_norm": "clip_grad grad_clip gradient_clipping gradient_clip_val",
    "optimizer.beta1": "betas adam_beta1 momentum",
    "optimizer.beta2": "betas adam_beta2",
    "optimizer.precision": "dtype torch_dtype bf16 bfloat16 fp16 mixed_precision",
    "pipeline.stages": "k pp pp_size num_stages pipeline_parallel_size pipeline_model_parallel_size",
    "pipeline.micro_batches": "m chunks num_microbatches n_microbatches gradient_accumulation_steps",
    "pipeline.replicas": "r dp dp_size data_parallel_size",
    "pipeline.virtual_stages": "v vpp num_model_chunks",
    "pipeline.remat": "recompute activation_checkpointing gradient_checkpointing",
    "pipeline.layers_per_cell": "balance split_points layers_per_stage",
    "train.steps": "epochs num_train_epochs max_steps max_iters train_iters",
    "train.checkpoint_every": "save_every save_steps save_interval",
    "train.validate_every": "eval_every eval_steps eval_interval",
    "train.batch_tokens train.batch_sequences train.batch_images train.batch_rows": "batch_size global_batch_size",
    "model.blocks_per_stack model.layers": "l layers depth n_layer num_layers num_hidden_layers",
    "model.width": "d_model hidden_size n_embd",
    "text.length text.max_length": "seq_len seq_length block_size context_length",
    # values
    "fill_drain": "gpipe",
    "zero_bubble": "zb zbh1",
    "bf16": "bfloat16 fp16 float16",
    "adamw": "adam",
}
"""What other libraries (torch, Megatron-LM, DeepSpeed, transformers) call our settings, and some of their values."""

_POWER_OF_TEN = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{1,18})?[eE]\+?[0-9]{1,2}")

_BOUNDS = {
    "ge": "{} or more",
    "gt": "above {}",
    "le": "{} or less",
    "lt": "below {}",
    "multiple_of": "a multiple of {}",
}
"""Pydantic's names of a number's bounds, and the bounds in words."""


@cache  # a sweep asks thousands of times
def paths(record: type[BaseModel]) -> dict[str, Any]:
    """Returns ``{"train.steps": int, "trace": bool, ...}``: the types of sections' fields, and of switches."""
    found: dict[str, Any] = {}
    for section, field in record.model_fields.items():
        kind = field.annotation
        if kind is bool:
            found[section] = bool
        elif fields := getattr(kind, "__pydantic_fields__", None):  # of a record, or of a model's shape
            hints = get_type_hints(kind, include_extras=True)
            found |= {f"{section}.{name}": _without_unit(hints[name]) for name in fields}
    return found


def _without_unit(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated and kind not in _KINDS else kind


def split(settings: str) -> list[str]:
    """Returns the settings of one text with blanks between; a value with blanks stands in quotes, as in a shell.

    Raises SettingError for a quote that is not closed.
    """
    try:
        return shlex.split(settings)
    except ValueError as error:
        quoted = option("SET", "\"train.checkpoint_dir='/my disk/runs'\"")
        raise SettingError(
            f"the settings {shortened(settings)!r} cannot be read ({error}); a value with blanks stands in quotes, "
            f"such as {quoted}"
        ) from None


def parse(settings: str | Iterable[str], record: type[BaseModel]) -> dict[str, Any]:
    """Returns ``{path: value}`` of ``path=value`` settings, given one by one or as one text with blanks between.

    Values stay texts, for the record to convert, but for None and tuples. Raises SettingError for an unknown path, a
    missing ``=`` and a path given twice.
    """
    known, given = paths(record), dict[str, Any]()
    for setting in split(settings) if isinstance(settings, str) else settings:
        if any(unicodedata.category(character) in ("Cc", "Cs") for character in setting.strip()):
            raise SettingError(
                f"setting {shortened(ascii(setting))} has characters that cannot be printed; remove them"
            )
        path, equals, value = (part.strip() for part in setting.partition("="))
        if not equals:
            raise SettingError(f"setting '{shortened(setting)}' has no '='; write field=value, such as train.steps=50")
        if re.search(r",\s*[a-z]+\.[a-z0-9_]+=", value):
            raise SettingError(
                f"'{shortened(setting)}' has settings with a comma between them; separate them by blanks"
            )
        if path == "pipeline":
            raise SettingError(
                f"pipeline takes only auto, and only in the {option('SET')} of {command('plan')}, "
                f"{command('experiment')} and {command('submit')}, for a new run; otherwise set pipeline.stages, "
                "pipeline.replicas and the others"
            )
        if path not in known:
            raise SettingError(_unknown(path, known))
        if path in given:
            first, second = shortened(str(given[path])), shortened(value)
            raise SettingError(f"{path} is set twice, to {first} and to {second}; set it once")
        given[path] = _convert(value, known[path])
    return given


def may_be_none(kind: Any) -> bool:
    """Returns whether a field of this type may be None."""
    return get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)


def describe(kind: Any, limits: Iterable[str] = ()) -> str:
    """Returns what a field of this type and these bounds takes, in words."""
    if may_be_none(kind):
        return f"{describe(_present(kind), limits)}, or none"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return "words with commas between" if str in get_args(kind) else "integers such as 10,12"
    return ", ".join([_KINDS.get(kind, str(kind)), *limits])


def bounds(metadata: Iterable[Any]) -> list[str]:
    """Returns the bounds among a pydantic field's constraints, in words."""
    limits = {bound: getattr(each, bound) for each in metadata for bound in _BOUNDS if hasattr(each, bound)}
    both = [f"{limits.pop('ge')} to {limits.pop('le')}"] if limits.keys() >= {"ge", "le"} else []
    return both + [_BOUNDS[bound].format(limit) for bound, limit in limits.items()]


def as_typed(value: Any) -> str:
    """Returns a field's value as a person types it after the ``=``."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def as_setting_error(fault: ValidationError, record: type[BaseModel], derived: Collection[str] = ()) -> SettingError:
    """Returns what pydantic found, each fault as one sentence: the field, what it takes, what was given. Faults of
    settings that are ``derived`` from others count only where there are no others."""
    known, found = paths(record), fault.errors(include_url=False)
    given = [error for error in found if _path_of(error) not in derived]
    return SettingError("; ".join(_sentence(error, known) for error in given or found))


def _path_of(error: Any) -> str:
    return ".".join([str(part) for part in error["loc"]][:2])


def _sentence(error: Any, known: dict[str, Any]) -> str:
    path = _path_of(error)
    why = error["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):  # the second: of a shape
        return _unknown(path, known)
    if error["type"] == "missing":
        return f"{path} is missing; give it a value"
    for bound, limit in error.get("ctx", {}).items():
        if path in known and bound in _BOUNDS:
            takes = describe(known[path], [_BOUNDS[bound].format(limit)])
            return f"{path} takes {takes}; it was given {shortened(str(error['input']))}"
    if path not in known:
        return f"{path}: {why}"
    sentence = f"{path} takes {describe(known[path])}; it was given {shortened(repr(error['input']))}"
    if error["type"] == "literal_error":
        ours = _ours(error["input"], get_args(_present(known[path])))
        return f"{sentence}; did you mean {', '.join(ours)}?" if ours else sentence
    return sentence if error["type"].endswith(("_parsing", "_type", "_from_float")) else f"{sentence}: {why}"


def _unknown(path: str, known: dict[str, Any]) -> str:
    """Returns the sentence for a setting that does not exist, with what it may stand for: the setting of that name in
    another section, or ours of a name in other libraries, or those spelled most like it."""
    leaf = path.rpartition(".")[2]
    ours = [name for name in known if _plain(name.rpartition(".")[2]) == _plain(leaf)] or _ours(leaf, known)
    hint = f"did you mean {', '.join(ours)}?" if ours else nearest(path, known)
    return f"{shortened(path)} is not a setting; {hint}"


def _ours(word: Any, known: Iterable[str]) -> list[str]:
    """Returns the names or values among the known ones that are this word, or that other libraries call so."""
    plain = _plain(str(word))
    called_so = {
        our for ours, names in OTHER_NAMES.items() if plain in map(_plain, names.split()) for our in ours.split()
    }
    return [name for name in known if name in called_so or _plain(name) == plain]


def _plain(name: str) -> str:
    """Returns a name without what libraries spell differently: case, dashes, dots and underscores."""
    return re.sub("[-_. ]", "", name.casefold())


def _present(kind: Any) -> Any:
    """Returns the type without its None."""
    return next(part for part in get_args(kind) if part is not type(None)) if may_be_none(kind) else kind


def _convert(value: str, kind: Any) -> Any:
    if may_be_none(kind):
        return None if value.lower() == "none" else _convert(value, _present(kind))
    if get_origin(kind) is tuple:
        parts = (part for part in value.strip("()[]").split(",") if part)
        return tuple(_convert(part, get_args(kind)[0]) for part in parts)
    if kind in (int, MicroBatches) and _POWER_OF_TEN.fullmatch(value):
        number = Decimal(value)
        return str(int(number)) if number == int(number) else value
    return value
