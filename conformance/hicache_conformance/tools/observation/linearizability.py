"""Searches for an order of concurrent calls about one page that explains all their answers.

This is the search of Wing and Gong, over orders that respect time. It remembers the pairs
(operations placed, state) that it has tried, as Lowe's does. It is for stores that keep pages until
they are deleted, and for histories of fewer than 200 operations per page.

    history = History()
    with history.recording(process=1, kind="set", value=7) as call:
        call.record_answer(storage.batch_set(space, [page_hash], [page])[0])
    found = explain(history.operations())
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hicache_conformance.tools.observation.history import READS, History, Kind, Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Counterexample", "History", "Kind", "Operation", "Undecided", "explain", "explain_each"]

_SHRINK_STATES = 20_000


@dataclass(frozen=True, slots=True)
class Counterexample:
    """Operations that no order explains. None of them can be left out."""

    operations: tuple[Operation, ...]
    culprit: Operation
    """The operation with the last answer. Some order explains the answers before it."""

    def lines(self) -> list[str]:
        """Return one line per operation, in the order in which they began."""
        return [
            f"{operation}{'   <- no order explains this' if operation == self.culprit else ''}"
            for operation in self.operations
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())


@dataclass(frozen=True, slots=True)
class Undecided:
    """The search gave up."""

    states: int
    """How many states it visited."""


def explain(
    history: Sequence[Operation], *, max_states: int = 200_000
) -> Counterexample | Undecided | None:
    """Return None if some order of the operations explains every answer, or else a counterexample.

    A set of a present page may change nothing (KV-005).
    """
    history = [each if each.returned is not None else each.unanswered for each in history]
    search = _Search(max_states)
    verdict = search.explains(history)
    if verdict is None:
        return Undecided(max_states)
    if verdict:
        return None
    return _minimized(history, _Search(min(max_states, _SHRINK_STATES)))


def explain_each(history: Sequence[Operation]) -> Counterexample | Undecided | None:
    """Return None if for each read some order of it and all writes explains its answer.

    Another read may need another order. This is what a page with a copy in several stores promises.
    """
    writes = [each for each in history if each.kind not in READS]
    undecided: Undecided | None = None
    for read in history:
        if read.kind in READS:
            found = explain([*writes, read])
            if isinstance(found, Counterexample):
                return found
            undecided = undecided or found
    return undecided


@dataclass(frozen=True, slots=True)
class _Search:
    """The model of a page (None while absent, else its version), and the search for an order."""

    max_states: int

    def explains(self, history: Sequence[Operation]) -> bool | None:
        """Return whether an order explains `history`, or None if `max_states` are not enough."""
        table = _Table.of(_relevant(history))
        if any(table.is_lost(version, 0, None) for version in table.gets):
            return False
        stack: list[tuple[int, int | None]] = [(0, None)]
        visited = set(stack)
        while stack:
            placed, state = stack.pop()
            placed = table.with_reads(placed, state)
            if placed & table.must == table.must:
                return True
            for number in self._writes(table, placed, state):
                for after in self._states_after(table.operations[number], state):
                    step = (placed | 1 << number, after)
                    if step not in visited and not self._loses(table, number, state, step):
                        visited.add(step)
                        stack.append(step)
            if len(visited) > self.max_states:
                return None
        return False

    def _writes(self, table: _Table, placed: int, state: int | None) -> list[int]:
        """Return the writes that may come next, beginning with the last that began.

        A write without an answer may come at any later time, so it need not come before a read sees
        it. Of several writes of this kind with the same effect, one is enough.
        """
        operations = [(number, table.operations[number]) for number in table.candidates(placed)]
        seen = {each.value for _, each in operations if each.kind == "get" and each.outcome}
        exists = any(each.kind == "exists" and each.outcome for _, each in operations)
        found: dict[tuple[str, int | None], int] = {}
        for number, each in operations:
            if each.kind in READS:
                continue
            if each.outcome is not None:
                found["answered", number] = number
            elif each.kind == "delete" and state is not None:
                found.setdefault(("delete", None), number)
            elif each.kind == "set" and (each.value in seen or (exists and state is None)):
                read = each.value in table.gets
                found.setdefault(("set", each.value if read else None), number)
        return sorted(found.values(), reverse=True)

    def _states_after(self, operation: Operation, state: int | None) -> Sequence[int | None]:
        """Return the states in which a set or a delete may leave a page."""
        if operation.kind == "delete":
            return (None,) if operation.outcome is not False else (None, state)
        return (operation.value,) if state is None else (state, operation.value)

    def _loses(
        self, table: _Table, number: int, before: int | None, step: tuple[int, int | None]
    ) -> bool:
        """Return whether a version that must still be read can't come back after `step`."""
        return any(table.is_lost(each, *step) for each in (before, table.operations[number].value))


@dataclass(frozen=True, slots=True)
class _Table:
    """Operations, sorted by time. A set of them is a number with one bit per operation."""

    operations: list[Operation]
    must: int
    """The operations that did take place, because they have an answer."""
    gets: dict[int | None, int]
    """For each version, the operations that read it."""
    sets: dict[int | None, int]

    @classmethod
    def of(cls, operations: list[Operation]) -> _Table:
        table = cls(operations, 0, {}, {})
        must = 0
        for number, each in enumerate(operations):
            must |= (each.outcome is not None) << number
            if each.kind == "set" or (each.kind == "get" and each.outcome):
                by_version = table.sets if each.kind == "set" else table.gets
                by_version[each.value] = by_version.get(each.value, 0) | 1 << number
        return replace(table, must=must)

    def is_lost(self, version: int | None, placed: int, state: int | None) -> bool:
        """Return whether `version` must still be read, but is not there and not set later."""
        to_read = self.gets.get(version, 0) & ~placed
        return bool(to_read) and state != version and not self.sets.get(version, 0) & ~placed

    def candidates(self, placed: int) -> list[int]:
        """Return the operations that may come next: they began before any unplaced one had returned."""
        found: list[int] = []
        first_return = float("inf")
        # All operations before `start` are placed.
        start = (~placed & (placed + 1)).bit_length() - 1
        for number in range(start, len(self.operations)):
            operation = self.operations[number]
            if operation.invoked > first_return:
                break
            if not placed >> number & 1:
                found.append(number)
                if operation.returned is not None:
                    first_return = min(first_return, operation.returned)
        return found

    def with_reads(self, placed: int, state: int | None) -> int:
        """Place every read that may come next and fits the state, because reads change nothing."""
        while True:
            fitting = [
                number
                for number in self.candidates(placed)
                if _is_fitting_read(self.operations[number], state)
            ]
            if not fitting:
                return placed
            for number in fitting:
                placed |= 1 << number


def _is_fitting_read(operation: Operation, state: int | None) -> bool:
    if operation.kind not in READS:
        return False
    if not operation.outcome:
        return state is None
    return state is not None and (operation.kind == "exists" or state == operation.value)


def _relevant(history: Sequence[Operation]) -> list[Operation]:
    """Return the operations that can make a difference, by time.

    A set that answered False had no effect (KV-006). An operation without an answer may have had no
    effect either. So it counts only if a read can have seen it: for a set, a read of its version;
    for a delete, a miss.
    """
    reads = [each for each in history if each.kind in READS and each.outcome is not None]
    exists = any(each.kind == "exists" and each.outcome for each in reads)
    missed = any(not each.outcome for each in reads)
    versions = {each.value for each in reads if each.kind == "get" and each.outcome}

    def counts(operation: Operation) -> bool:
        if operation.outcome is not None:
            return operation.kind != "set" or operation.outcome
        if operation.kind == "set":
            return exists or operation.value in versions
        return operation.kind == "delete" and missed

    return sorted(filter(counts, history), key=lambda each: each.invoked)


# --- the smallest counterexample -----------------------------------------------------------------


def _minimized(history: Sequence[Operation], search: _Search) -> Counterexample:
    """Return the shortest beginning that no order explains, and drop needless operations from it."""
    culprit, beginning = _shortest_beginning(history, search)
    reduced = _without_needless_answers(beginning, culprit, search)
    for number, each in enumerate(reduced):
        without = reduced[:number] + reduced[number + 1 :]
        if each.kind == "delete" and each is not culprit and search.explains(without) is False:
            reduced[number] = each.unanswered
    reads = [each for each in reduced if each.kind in READS and each.outcome is not None]
    seen = {each.value for each in reads if each.kind == "get" and each.outcome}
    missed = any(not each.outcome for each in reads)
    kept = [
        operation
        for operation, kept_answer in zip(beginning, reduced, strict=True)
        if kept_answer.outcome is not None
        or (operation.kind == "set" and operation.value in seen)
        or (operation.kind == "delete" and operation.outcome is None and missed)
    ]
    return Counterexample(tuple(sorted(kept, key=lambda each: each.invoked)), culprit)


def _without_needless_answers(
    operations: list[Operation], culprit: Operation, search: _Search
) -> list[Operation]:
    """Remove answers as long as no order explains the operations.

    Only the answer is removed, not the operation: a set without an answer may still have had its
    effect.
    """
    reduced = list(operations)
    numbers = [
        n for n, each in enumerate(operations) if each is not culprit and each.outcome is not None
    ]
    numbers.sort(key=lambda number: operations[number].kind not in READS)
    size = len(numbers)
    while size:
        for start in range(0, len(numbers), size):
            without = list(reduced)
            for number in numbers[start : start + size]:
                without[number] = operations[number].unanswered
            if search.explains(without) is False:
                reduced = without
        size //= 2
    return reduced


def _shortest_beginning(
    history: Sequence[Operation], search: _Search
) -> tuple[Operation, list[Operation]]:
    """Return the operation whose return ends the beginning, and the operations as known at that time."""
    by_return = sorted(
        (each for each in history if each.returned is not None), key=lambda each: each.returned or 0
    )
    low, high = 0, len(by_return) - 1
    while low < high:
        middle = (low + high) // 2
        if search.explains(_known_until(history, by_return[middle])) is False:
            high = middle
        else:
            low = middle + 1
    return by_return[low], _known_until(history, by_return[low])


def _known_until(history: Sequence[Operation], last: Operation) -> list[Operation]:
    """Return `history` as it was known when `last` returned."""
    end = last.returned
    assert end is not None, "it is one of those that returned"
    return [
        each if each.returned is not None and each.returned <= end else each.unanswered
        for each in history
        if each.invoked <= end
    ]
