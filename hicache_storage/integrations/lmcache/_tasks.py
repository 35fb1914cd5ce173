"""Run LMCache's tasks as jobs: group a task's pages by key space, and put the verdicts back in order."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from hicache_storage.page import Page
from hicache_storage.page_store.results import Transfer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_storage.integrations.lmcache._engine import MemoryObject, ObjectKey
    from hicache_storage.keys import KeySpace

R = TypeVar("R")


class ObjectPages(Sequence[Page]):
    """The memory of objects as pages, without a copy.

    A thread of the runner makes the pages when it reads the first of them. So LMCache's own thread is
    free to submit the next task.
    """

    def __init__(self, objects: Sequence[MemoryObject]) -> None:
        self._objects = objects
        self._made: list[Page] = []

    def __len__(self) -> int:
        return len(self._objects)

    @overload
    def __getitem__(self, place: int) -> Page: ...
    @overload
    def __getitem__(self, place: slice) -> list[Page]: ...
    def __getitem__(self, place: int | slice) -> Page | list[Page]:
        return self._pages()[place]

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages())

    def _pages(self) -> list[Page]:
        if len(self._made) < len(self._objects):
            views = [memoryview(one.byte_array).cast("B") for one in self._objects]
            self._made = [Page.of_views((view,), view.nbytes) for view in views]
        return self._made


@dataclass(slots=True)
class Group:
    """The pages of a task that belong to one key space."""

    space: KeySpace
    hashes: list[str] = field(default_factory=list[str])
    places: list[int] = field(default_factory=list[int])
    """The positions of these pages in the task."""
    objects: list[MemoryObject] = field(default_factory=list["MemoryObject"])

    def batch(self) -> Transfer:
        """Return the pages of the group in the memory of their objects, without a copy."""
        return Transfer(self.space, self.hashes, ObjectPages(self.objects))


@dataclass(frozen=True, slots=True)
class Task:
    """A task of LMCache that has not ended."""

    keys: Sequence[ObjectKey]
    groups: Sequence[Group]
    began_s: float = field(default_factory=time.monotonic)

    def age_s(self) -> float:
        """Return the time since the submission."""
        return time.monotonic() - self.began_s

    def places(self, verdicts: Sequence[Iterable[object]], *wanted: object) -> list[int]:
        """Return the positions of the pages whose verdict is one of `wanted`."""
        return [
            place
            for group, found in zip(self.groups, verdicts, strict=True)
            for place, verdict in zip(group.places, found, strict=True)
            if verdict in wanted
        ]


class TaskQueue(Generic[R]):
    """The tasks of one kind, their results, and the eventfd that signals them. Thread-safe."""

    def __init__(self) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._tasks: dict[int, Task] = {}
        self._results: dict[int, R] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, task_id: int, task: Task) -> None:
        """Register a task. Call it before the job is submitted."""
        self._tasks[task_id] = task

    def end(self, task_id: int) -> Task | None:
        """Return the task of a job that has ended, or None if it was returned before."""
        return self._tasks.pop(task_id, None)

    def finish(self, task_id: int, result: R) -> None:
        """Add the result of a task, and signal the eventfd."""
        with self._lock:
            self._results[task_id] = result
            if not self._closed:
                with suppress(BlockingIOError):  # a full eventfd counter wakes LMCache, too
                    os.eventfd_write(self.event_fd, 1)

    def take(self, task_id: int) -> R | None:
        """Return the result of a task, or None if there is none. A result is returned only once."""
        return self._results.pop(task_id, None)

    def take_all(self) -> dict[int, R]:
        """Return every result that no earlier call returned."""
        with self._lock:
            taken, self._results = self._results, {}
        return taken

    def close(self) -> None:
        """Close the eventfd. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.event_fd)


def groups_of(spaces: Sequence[KeySpace | None], hashes: Sequence[str]) -> list[Group]:
    """Group the pages of a task by key space. Pages without a key space are left out.

    Key spaces are compared by identity, because it would take longer to hash all their fields for each
    page.
    """
    groups: dict[int, Group] = {}
    for place, (space, page_hash) in enumerate(zip(spaces, hashes, strict=True)):
        if space is not None:
            group = groups.get(id(space))
            if group is None:
                group = groups[id(space)] = Group(space)
            group.hashes.append(page_hash)
            group.places.append(place)
    return list(groups.values())


def add_objects(groups: Sequence[Group], objects: Sequence[Any]) -> None:
    """Add to each group the objects of its pages."""
    for group in groups:
        group.objects = [objects[place] for place in group.places]
