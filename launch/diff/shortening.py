"""How many layers of a model too large for one process ``gpipe check`` trains.

layers  0  1 1 1 1 1 1  2  3 3 3 3 3 3  4        rows of equal layers
kept    0  1 1          2  3 3          4        as many of each row as fit
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable

from rich.console import Console

from experiments.base.experiment import Experiment
from experiments.planning.single_plan import estimated_costs, try_plan
from launch.diff.plain_training import shortage
from launch.diff.short_training import shared_devices
from suite.errors import PlanError
from suite.settings import PipelineSettings


def shortened_to_fit(
    chosen: Experiment, shapes_of: Callable[[int], Iterable[PipelineSettings]], console: Console
) -> Experiment:
    """Returns an experiment, if its model is too large for one process with as many of its equal layers as fit, there
    and in all pipelines, and prints their number; unchanged if two of each row are too many. ``shapes_of`` returns the
    pipelines for a number of layers."""
    if not (too_large := shortage(chosen)):
        return chosen
    console.print(f"{too_large}; looking for how many of its equal layers fit")

    def is_too_large(choice: Experiment) -> bool:
        try:
            for shape in shapes_of(choice.list_length):
                try_plan(choice.with_pipeline(shape), shared_devices(), estimated_costs)
        except PlanError:
            return True
        return bool(shortage(choice))

    whole = chosen.list_length
    choices = [chosen.model_copy(update={"most_equal_layers": most}) for most in range(2, whole)]
    fitting = choices[: bisect(choices, False, key=is_too_large)]
    if not fitting:
        return chosen
    short = fitting[-1]
    console.print(
        f"{short.list_length} of its {whole} layers are checked, the first {short.most_equal_layers} of each row of "
        "equal ones; they are numbered anew"
    )
    return short
