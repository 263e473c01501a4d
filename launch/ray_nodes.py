"""Starts actors and tasks on chosen nodes of a Ray cluster, and collects their results before a deadline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from suite.errors import SuiteError, first_line
from suite.pipeline.planning.placement import Node

Key = TypeVar("Key")

CANCEL_S = 10.0
"""Seconds for the nodes to clean up after a failure on one."""


def start_on(node_id: str, target: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Starts an actor (``target`` is a class) or a task (a function) on one node, with Ray's ``options``; unless they
    say otherwise it takes no device. Returns the actor's handle, or the task's object reference."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(target).options(**{"num_cpus": 0} | options, scheduling_strategy=where).remote(*args)


def own_node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def alive_nodes() -> list[dict[str, Any]]:
    """Returns Ray's records of the nodes that it counts as alive."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def collect(calls: Mapping[Key, Any], timeout_s: float, late: str = "") -> tuple[dict[Key, Any], dict[Key, str]]:
    """Returns the results of running calls after at most ``timeout_s``, and the reason for each without a result.
    ``late`` is the reason for a call that is still running."""
    import ray

    ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
    answers: dict[Key, Any] = {}
    unanswered: dict[Key, str] = {}
    for key, call in calls.items():
        if call not in ready:
            unanswered[key] = late or f"no answer in {timeout_s:g} s"
            continue
        try:
            answers[key] = ray.get(call, timeout=timeout_s)
        except Exception as error:  # of many types: raised by Ray, or the result is unreadable
            unanswered[key] = reason(error)
    return answers, unanswered


def cancel(call: Any) -> None:
    """Ends a call that hangs in a driver and would keep its device."""
    import ray

    with suppress(Exception):
        ray.cancel(call, force=True)


def run_on_all(
    nodes: Sequence[Node],
    task: Callable[..., Any],
    *args: Any,
    limit_s: float,
    fault: Callable[[Node, str], SuiteError],
    late: str = "",
    **options: Any,
) -> dict[Node, Any]:
    """Runs a function as a Ray task on each node, with Ray's ``options``; returns the results. Where it fails or takes
    longer than ``limit_s``, it cancels all tasks and raises what ``fault`` returns for the node and the reason."""
    import ray

    calls = {node: start_on(node.id, task, *args, max_retries=0, **options) for node in nodes}
    try:
        results, failures = collect(calls, limit_s, late)
        for node, why in failures.items():
            raise fault(node, why)
    except BaseException:
        with suppress(Exception):
            for call in calls.values():
                ray.cancel(call)
            _, running = collect(calls, CANCEL_S)
            for node in running:
                cancel(calls[node])
        raise
    return results


def reason(error: Exception) -> str:
    """Returns one line that says why a call failed: of the exception in the call, or of Ray's own."""
    return first_line(getattr(error, "cause", None) or error)
