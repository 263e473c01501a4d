"""The names of experiments and sweeps, known without torch, whose import takes seconds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal

from experiments.base.hints import command, option
from suite.errors import SettingError, nearest

ENTRY_POINTS = "gpipe.experiments"

Scale = Literal["auto", "paper", "laptop", "slice"]
"""A scale as it is asked for."""

SWEEP_NAMES = (
    *("depth_width", "capacity", "batch_size", "temperature", "bilingual", "low_resource", "romance"),
    *("trainability", "transfer"),
)

TRANSFORMER, AMOEBANET = "transformer_<L>", "amoebanet_<L>x<D>"
"""Names of models of any size."""

_SIZED = {TRANSFORMER: r"transformer_[1-9]\d{0,5}", AMOEBANET: r"amoebanet_\d{1,4}x\d{1,6}"}


@cache
def experiment_names() -> tuple[str, ...]:
    """Returns the names of the experiments, those of other packages last: from the source of this one."""
    sources = sorted(Path(__file__).parent.glob("*/runs.py"))
    own = [name for path in sources for name in re.findall(r"^def ([a-z]\w*)\(\)", path.read_text(), re.MULTILINE)]
    return tuple(dict.fromkeys([*own, *(entry.name for entry in entry_points(group=ENTRY_POINTS))]))


def is_source(name: str) -> bool:
    """Whether a name stands for a function of a file or of a module, as no name of the registry does."""
    return ":" in name


def check_experiment(name: str, others: Sequence[str] = (TRANSFORMER,)) -> None:
    """Raises SettingError, with the closest names, for one of no experiment, no source and none of ``others``."""
    if not name:
        raise SettingError(f"which experiment? Name one with {option('NAME')}; {command('list')} lists them")
    is_sized = any(re.fullmatch(_SIZED[other], name) for other in others if other in _SIZED)
    if is_source(name) or is_sized or name in {*experiment_names(), *others} - _SIZED.keys():
        return
    if name in _SIZED:
        raise SettingError(f"{name} stands for models of any size; write numbers: transformer_13, amoebanet_18x256")
    if name.endswith(".py"):
        raise SettingError(f"{name} is a file; name the function in it: {name}:function")
    raise SettingError(f"there is no experiment {name}; {nearest(name, [*experiment_names(), *others])}")


def check_sweep(name: str) -> None:
    """Raises SettingError with the closest names for an unknown sweep."""
    if name not in SWEEP_NAMES:
        raise SettingError(f"there is no sweep {name!r}; {nearest(name, SWEEP_NAMES)}")
