"""The suite's sweeps by name."""

from __future__ import annotations

from experiments.names import check_sweep
from experiments.sweeps import batch_size, low_resource, multilingual, trainability, transfer
from experiments.sweeps.sweep import Sweep
from suite.errors import SettingError, nearest

SWEEPS: dict[str, Sweep] = {
    sweep.name: sweep
    for sweep in (
        multilingual.DEPTH_WIDTH_SWEEP,
        multilingual.CAPACITY_SWEEP,
        batch_size.SWEEP,
        multilingual.TEMPERATURE_SWEEP,
        multilingual.BILINGUAL_SWEEP,
        low_resource.SWEEP,
        multilingual.ROMANCE_SWEEP,
        trainability.SWEEP,
        transfer.SWEEP,
    )
}


def find_sweep(name: str) -> Sweep:
    """Raises SettingError with the closest names for an unknown one."""
    check_sweep(name)
    return SWEEPS[name]


def find_scale(sweep: Sweep, requested: str) -> str:
    """Returns the requested scale; ``auto`` is the sweep's first scale, or empty for a sweep without scales.

    Raises SettingError with the closest names for an unknown scale.
    """
    if requested == "auto":
        return sweep.scales[0] if sweep.scales else ""
    if requested not in sweep.scales:
        known = nearest(requested, [*sweep.scales, "auto"]) if sweep.scales else "omit SCALE"
        raise SettingError(f"sweep {sweep.name} has no scale {requested!r}; {known}")
    return requested
