"""The records of a run that no driver made: what its workers read from its folder."""

import json
from dataclasses import asdict

from launch.worker.attempt import Attempt, draft_of
from launch.worker.run_plan import RunPlan
from suite.pipeline.schedule.config import ScheduleConfig


def write_records(run, experiment, cells, data, resume=False):
    """Writes an experiment and its plan, as drafts for a resumed run; returns the plan and the attempt."""
    pipeline = experiment.pipeline
    plan = RunPlan(tuple(cells), ScheduleConfig.from_settings(pipeline))
    for file, text in ((run.experiment, experiment.to_toml()), (run.plan_json, json.dumps(asdict(plan)))):
        (draft_of(file) if resume else file).write_text(text)
    return plan, Attempt(run.path, data, pipeline.stages * pipeline.replicas, resume=resume)
