"""stub until the merge"""

from collections.abc import Mapping
from typing import Any


def step_line(values: Mapping[str, Any], steps: int, unit: str) -> str:
    """stub"""
    speed = values[f"throughput/{unit}_per_s"]
    return f"step {values['step']}/{steps}  loss {values['train/loss']:.3f}  {speed:,.0f} {unit}/s"
