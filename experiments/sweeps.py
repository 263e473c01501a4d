"""Sweeps by name."""

from __future__ import annotations

from experiments import batch_size, bilingual, capacity, depth_width, temperature, trainability, transfer
from experiments.cluster import Cluster
from experiments.sweep import Sweep
from suite.errors import SettingError, nearest

SWEEPS: dict[str, Sweep] = {
    sweep.name: sweep
    for sweep in (
        depth_width.SWEEP, capacity.SWEEP, batch_size.SWEEP, temperature.SWEEP, bilingual.SWEEP, trainability.SWEEP,
        transfer.SWEEP,
    )
}  # fmt: skip


def find_sweep(name: str) -> Sweep:
    """Returns a sweep by its name. Raises SettingError with the nearest names to an unknown one."""
    if name not in SWEEPS:
        raise SettingError(f"no sweep is called {name!r}; {nearest(name, SWEEPS)}")
    return SWEEPS[name]


def find_scale(sweep: Sweep, asked: str, cluster: Cluster) -> str:
    """Returns the scale asked for; ``auto`` is the first that the sweep has. One that knows none has the empty name.

    Raises SettingError with the nearest names to one that the sweep does not have.
    """
    if asked == "auto":
        return sweep.scales[0] if sweep.scales else ""
    if asked not in sweep.scales:
        known = f"{nearest(asked, [*sweep.scales, 'auto'])}" if sweep.scales else "leave SCALE out"
        raise SettingError(f"sweep {sweep.name} has no scale {asked!r}; {known}")
    return asked
