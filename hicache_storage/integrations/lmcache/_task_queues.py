"""Queues for an adapter's tasks, one for each kind, which get results when the jobs of a session end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_storage.integrations._jobs import JobKind
from hicache_storage.integrations.lmcache._tasks import TaskQueue
from hicache_storage.page_store.results import Verdict
from hicache_storage.request_log import Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.integrations._jobs import JobResult
    from hicache_storage.integrations.lmcache._attachment import Session
    from hicache_storage.integrations.lmcache._engine import EngineTypes
    from hicache_storage.integrations.lmcache._tasks import Task


class TaskQueues:
    """The queues of an adapter's stores, lookups and loads. Thread-safe."""

    def __init__(self, engine: EngineTypes, notify: Callable[..., None]) -> None:
        """Make empty queues. They call `notify` with an event, its keys and the sizes of the objects."""
        self.stores: TaskQueue[Any] = TaskQueue()
        self.lookups: TaskQueue[Any] = TaskQueue()
        self.loads: TaskQueue[Any] = TaskQueue()
        self._engine = engine
        self._notify = notify

    def close(self) -> None:
        """Close the eventfds. Idempotent."""
        for queue in (self.stores, self.lookups, self.loads):
            queue.close()

    def finish(self, session: Session, kind: JobKind) -> None:
        """Fetch the results of jobs that have ended. The runner's thread calls it."""
        if kind is JobKind.STORE:
            for result in session.runner.finished_stores():
                self._end_store(session, result)
        elif kind is JobKind.LOAD:
            for result in session.runner.finished_loads():
                self._end_read(session, self.loads, result.job_id, result.verdicts)
        else:
            for answer in session.runner.finished_lookups():
                self._end_read(session, self.lookups, answer.job_id, answer.verdicts)

    def _end_store(self, session: Session, result: JobResult) -> None:
        task_id, verdicts = result.job_id, result.verdicts
        task = self.stores.end(task_id)
        if task is None:
            return
        _explain(session, Operation.STORE, task, verdicts)
        places = task.places(verdicts, Verdict.OK)
        settled = task.places(verdicts, Verdict.OK, Verdict.NOT_ADMITTED)
        sizes = {place: group.space.page_nbytes for group in task.groups for place in group.places}
        if places:
            keys = [task.keys[place] for place in places]
            self._notify("stored", keys, [sizes[place] for place in places])
        succeeded = len(settled) == len(task.keys)
        self.stores.finish(task_id, self._engine.store_result(succeeded, result.nbytes))

    def _end_read(
        self,
        session: Session,
        queue: TaskQueue[Any],
        task_id: int,
        verdicts: Sequence[Sequence[Verdict]],
    ) -> None:
        task = queue.end(task_id)
        if task is None:
            return
        operation = Operation.LOAD if queue is self.loads else Operation.LOOKUP
        _explain(session, operation, task, verdicts)
        bitmap = self._engine.bitmap(len(task.keys))
        places = task.places(verdicts, Verdict.OK)
        for place in places:
            bitmap.set(place)
        if places and queue is self.loads:
            self._notify("accessed", [task.keys[place] for place in places])
        queue.finish(task_id, bitmap)


def _explain(
    session: Session, operation: Operation, task: Task, verdicts: Sequence[Sequence[Verdict]]
) -> None:
    """Log the pages of a task, for each key space."""
    if session.explain_log is None:
        return
    for group, found in zip(task.groups, verdicts, strict=False):
        pool = group.space.pool
        session.explain_log.add_pages(
            operation, group.hashes, [found], pool, elapsed_s=task.age_s()
        )
