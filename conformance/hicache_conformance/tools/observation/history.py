"""The calls about one page, with their answers and times."""

from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Generator

Kind: TypeAlias = Literal["set", "get", "delete", "exists"]
READS: tuple[Kind, ...] = ("get", "exists")


@dataclass(frozen=True, slots=True)
class Operation:
    """One call about one page, and its answer."""

    process: int
    """The number of the calling thread or process, for people."""
    invoked: int
    """When the call was made, by any clock that never stands still."""
    returned: int | None
    """When the answer came. None: a set or delete may take effect later or never."""
    kind: Kind
    value: int | None = None
    """The version that was set or read."""
    outcome: bool | None = None
    """The verdict, or None without an answer."""

    @property
    def unanswered(self) -> Operation:
        """The same operation without an answer."""
        return replace(self, returned=None, outcome=None)

    def __str__(self) -> str:
        what = f"set version {self.value}" if self.kind == "set" else self.kind
        if self.outcome is None:
            answer = "no answer"
        elif self.kind == "get" and self.outcome:
            answer = f"version {self.value}"
        else:
            answer = "miss" if self.kind == "get" else str(self.outcome)
        until = "" if self.returned is None else self.returned
        return f"process {self.process}: {what} -> {answer} [{self.invoked}..{until}]"


class Call:
    """A running operation."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    def record_answer(self, outcome: bool, value: int | None = None) -> None:  # noqa: FBT001 - a verdict
        """Record the answer. `value` is the version that was read."""
        known = self.operation.value if value is None else value
        self.operation = replace(self.operation, outcome=outcome, value=known)


class History:
    """The operations of one page. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clock = itertools.count()
        self._calls: list[Call] = []

    @contextmanager
    def recording(self, *, process: int, kind: Kind, value: int | None = None) -> Generator[Call]:
        """Record the call in the block. An exception counts as no answer."""
        with self._lock:
            call = Call(Operation(process, next(self._clock), None, kind, value))
            self._calls.append(call)
        yield call
        with self._lock:
            if call.operation.outcome is not None:
                call.operation = replace(call.operation, returned=next(self._clock))

    def operations(self) -> list[Operation]:
        """Return all operations so far, in the order in which they began."""
        with self._lock:
            return [
                call.operation if call.operation.returned is not None else call.operation.unanswered
                for call in self._calls
            ]
