"""Strategies choose which thread runs next.

`RandomWalk` chooses at each point. `PriorityWalk` gives each thread a random priority and changes
it at a few random points (Burckhardt et al., ASPLOS 2010: "A Randomized Scheduler with
Probabilistic Guarantees of Finding Bugs"), to find faults that need few switches at exact places.
`Replay` repeats the choices of a run.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from interleavings.scheduler import CLOCK, Task

Key: TypeAlias = tuple[int, int]
"""A choice: the number of the task that was current, and the number of its choice."""


class Strategy(Protocol):
    """The choices of one run."""

    def add(self, task: Task) -> None:
        """Add a new task."""

    def choose(
        self, key: Key, default: Task, ready: Sequence[Task], *, can_wait: bool
    ) -> Task | None:
        """Return one of the `ready` tasks, or, if `can_wait`, None to let a time limit pass."""
        ...

    def pick(self, key: Key, options: int) -> int:
        """Return a number below `options`."""
        ...


class RandomWalk:
    """A strategy of random choices. The seed also decides how often threads are switched."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._stays = self._random.choice((0.0, 0.5, 0.8, 0.95))
        self._passes = self._random.choice((0.0, 0.0, 0.01, 0.1))

    def add(self, task: Task) -> None:
        """Do nothing: all tasks are alike."""

    def choose(
        self, key: Key, default: Task, ready: Sequence[Task], *, can_wait: bool
    ) -> Task | None:
        draw = self._random.random
        if can_wait and draw() < self._passes:
            return None
        if draw() < self._stays:
            return default
        return ready[int(draw() * len(ready))]

    def pick(self, key: Key, options: int) -> int:
        return self._random.randrange(options)


class PriorityWalk:
    """A strategy that runs the ready task of highest priority, until a change point lowers that."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        length = self._random.choice((32, 128, 512, 2048))
        changes = self._random.randint(1, 5)
        self._changes = {self._random.randrange(length): -number for number in range(changes)}
        self._passes = self._random.choice((0.0, 0.0, 0.01))
        self._priorities: dict[int, float] = {}
        self._choices = 0

    def add(self, task: Task) -> None:
        self._priorities[task.number] = 1 + self._random.random()

    def choose(
        self, key: Key, default: Task, ready: Sequence[Task], *, can_wait: bool
    ) -> Task | None:
        if can_wait and self._passes and self._random.random() < self._passes:
            return None
        lowered = self._changes.get(self._choices)
        self._choices += 1
        if lowered is not None:
            self._priorities[default.number] = lowered
        priorities = self._priorities
        return max(ready, key=lambda task: priorities[task.number])

    def pick(self, key: Key, options: int) -> int:
        return self._random.randrange(options)


class Replay:
    """A strategy that makes the default choice at each point, except for given deviations."""

    def __init__(self, deviations: Mapping[Key, int]) -> None:
        self._deviations = deviations

    def add(self, task: Task) -> None:
        """Do nothing: the deviations name the tasks."""

    def choose(
        self, key: Key, default: Task, ready: Sequence[Task], *, can_wait: bool
    ) -> Task | None:
        wanted = self._deviations.get(key)
        if wanted == CLOCK:
            return None if can_wait else default
        return next((task for task in ready if task.number == wanted), default)

    def pick(self, key: Key, options: int) -> int:
        return min(max(0, self._deviations.get(key, 0)), options - 1)


def of_seed(seed: int) -> Strategy:
    """Return the strategy of a seed. Every second seed uses priorities."""
    return PriorityWalk(seed) if seed % 2 else RandomWalk(seed)
