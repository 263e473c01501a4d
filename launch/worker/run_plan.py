"""The part of a run's ``plan.json`` that its workers follow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from launch.worker.distributed import GROUP_TIMEOUT_S
from models.chunked_loss import CPU_LOGITS_BYTES
from suite.errors import RunFileError
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.flops import StepFlops
from suite.pipeline.schedule.config import ScheduleConfig
from suite.settings import PipelineSettings
from suite.training.loop import MESSAGE_TIMEOUT_STEPS


@dataclass(frozen=True)
class RunPlan:
    """How a run is trained; its fields are fields of ``plan.json``."""

    cells: tuple[int, ...]
    """Layers of each cell."""
    schedule_config: ScheduleConfig
    step_s: float = 0.0
    """Predicted duration of a step."""
    flops: StepFlops | None = None
    """Operations of a step; None if the model has none, or if they could not be counted."""
    busy_s: tuple[float, ...] = ()
    """Seconds in which each stage computes in a step; empty where the plan is not exact enough to compare."""
    logits_bytes: int = CPU_LOGITS_BYTES
    """The size of logits that the devices compute at once (``models.chunked_loss``)."""

    @staticmethod
    def read(path: Path) -> RunPlan:
        """Reads it from a ``plan.json``. Raises RunFileError for none, or a damaged one."""
        try:
            return _ADAPTER.validate_json(path.read_bytes())
        except FileNotFoundError:
            fault = f"{path} is missing; resume the run to plan it anew"
        except OSError as error:
            fault = f"{path} cannot be read: {error.strerror}"
        except ValidationError as error:
            fault = f"{path} is damaged: {error.errors()[0]['msg']}; resume the run to plan it anew"
        raise RunFileError(fault)

    def coord(self, rank: int, pipeline: PipelineSettings) -> RankCoord:
        cell_to_stage = self.schedule_config.cell_to_stage(pipeline.stages)
        return RankCoord(rank, pipeline.stages, pipeline.replicas, cell_to_stage)

    @property
    def timeout_s(self) -> float:
        """Limit for a wait, a collective or an action, as long as no step has been measured."""
        return max(GROUP_TIMEOUT_S, MESSAGE_TIMEOUT_STEPS * self.step_s)


_ADAPTER = TypeAdapter(RunPlan)
