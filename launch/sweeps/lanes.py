"""Tasks side by side on the cores there are.

2 cores   train t64 ==== train t128 =======================  train t12 ===  score t64 ==      of those that may begin,
          (both cores)   (both cores)                        train de ====  score t128 ====   the one that needs most
                                                                                              goes first
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from suite.errors import WorkerError

PERIOD = 0.5


@dataclass(frozen=True)
class Task:
    """Something to be done in a thread of its own, whose work is done by processes."""

    name: str
    cores: int
    work: Callable[[], None]
    after: tuple[str, ...] = ()
    """Names of tasks that must have been done before; where one of them failed, this one is not begun."""


def run_tasks(
    tasks: Sequence[Task],
    cores: int,
    ended: Callable[[Task, BaseException | None], None],
    begun: Callable[[Task], None] = lambda task: None,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Runs all tasks; one that fails takes none but those after it with it. ``ended`` hears how each went.

    A task that needs more cores than there are runs alone. ``look`` is called twice a second. Threads are daemons: an
    interrupt ends the wait here at once, and the process that ends then takes the tasks' processes with it.
    """
    waiting, running, done, broken = list(tasks), dict[str, Task](), set[str](), set[str]()
    news: queue.Queue[tuple[Task, BaseException | None]] = queue.Queue()
    names = {task.name for task in tasks}

    def run(task: Task) -> None:
        try:
            task.work()
        except BaseException as error:
            news.put((task, error))
        else:
            news.put((task, None))

    while waiting or running:
        for task in [task for task in waiting if broken & set(task.after)]:
            waiting.remove(task)
            broken.add(task.name)
            ended(task, WorkerError(f"not begun, since {' and '.join(sorted(broken & set(task.after)))} failed"))
        free = cores - sum(task.cores for task in running.values())
        ready = [task for task in waiting if not (set(task.after) & names) - done]
        fitting = [task for task in ready if task.cores <= free or not running]
        if fitting:
            task = max(fitting, key=lambda one: one.cores)
            waiting.remove(task)
            running[task.name] = task
            begun(task)
            threading.Thread(target=run, args=(task,), daemon=True).start()
            continue
        if not running:
            continue  # all that waited went with a failure
        try:
            task, error = news.get(timeout=PERIOD)
        except queue.Empty:
            look()
            continue
        del running[task.name]
        (done if error is None else broken).add(task.name)
        ended(task, error)
