"""The trace of a check: it records calls, and gives the shortest sequence that shows a failure."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace

_SHOWN_CALLS = 12
_SHOWN_PAGES = 4
_NAME_DIGITS = 8
_CLEAR = ".clear "


@dataclass(slots=True)
class _Call:
    line: str
    pages: tuple[str, ...]
    """The first digits of the page hashes, in the order of the batch."""
    began_s: float = field(default_factory=time.monotonic)
    answer: object = "..."

    def mentions(self, words: Sequence[str]) -> bool:
        return any(word in self.line or word in self.pages for word in words)

    def text(self, words: Sequence[str]) -> str:
        """Return the call in one line. For a large batch, show only the pages among `words`."""
        places = [place for place, page in enumerate(self.pages) if page in words]
        if len(self.pages) <= _SHOWN_PAGES:
            return f"{self.line}({', '.join(self.pages)}) -> {_short(self.answer)}"
        if not places:
            shown = ", ".join(self.pages[:_SHOWN_PAGES])
            return f"{self.line}({shown}, ... {len(self.pages)} pages) -> {_short(self.answer)}"
        shown = ", ".join(f"[{place}] {self.pages[place]}" for place in places[:_SHOWN_PAGES])
        return f"{self.line}({shown} of {len(self.pages)} pages) -> {self._answers(places)}"

    def _answers(self, places: Sequence[int]) -> str:
        answer = self.answer
        if not isinstance(answer, list):
            return _short(answer)
        answers = cast("list[object]", answer)
        return ", ".join(
            f"[{place}] {_short(answers[place])}"
            for place in places[:_SHOWN_PAGES]
            if place < len(answers)
        )


class Trace:
    """The calls of one check on all its storages, in order. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[_Call] = []
        self._running: dict[int, _Call] = {}
        self.footprint: list[int] = []
        """The size in bytes of every page whose set returned True, in order."""
        self.stored: defaultdict[KeySpace, set[str]] = defaultdict(set)
        """Every page whose set returned True. They are removed from a store that outlives the check."""
        self._undeleted: set[tuple[str, str]] = set()
        """The space ids and hashes of pages whose last delete returned False."""
        self._offers: Counter[tuple[str, str]] = Counter()
        """How many sets may have stored a page, by space id and page hash."""

    def began(self, line: str, hashes: Sequence[str] = ()) -> int:
        """Record the start of a call: its line and its pages. Return the number for `ended`."""
        call = _Call(line, tuple(page_hash[:_NAME_DIGITS] for page_hash in hashes))
        with self._lock:
            number = len(self._calls)
            self._calls.append(call)
            self._running[number] = call
            return number

    def ended(self, number: int, answer: object) -> None:
        """Record the answer of a call: its verdicts, or any other value."""
        with self._lock:
            call = self._running.pop(number)
            call.answer = answer if _has_verdicts(call, answer) else _words(answer)

    def deleted(self, space: KeySpace, hashes: Sequence[str], verdicts: Sequence[bool]) -> None:
        """Record the verdicts of a delete."""
        with self._lock:
            for page_hash, gone in zip(hashes, verdicts, strict=True):
                self._undeleted.discard((space.id, page_hash))
                if not gone:
                    self._undeleted.add((space.id, page_hash))

    def was_not_deleted(self, space: KeySpace, page_hash: str) -> bool:
        """Return True if the last delete of the page returned False."""
        with self._lock:
            return (space.id, page_hash) in self._undeleted

    def offered(self, space: KeySpace, hashes: Sequence[str]) -> None:
        """Record the start of a set of these pages."""
        with self._lock:
            self._offers.update((space.id, page_hash) for page_hash in hashes)

    def withdrawn(self, space: KeySpace, hashes: Sequence[str]) -> None:
        """Record that a set of these pages was refused and stored nothing."""
        with self._lock:
            self._offers.subtract((space.id, page_hash) for page_hash in hashes)

    def offered_times(self, space: KeySpace, hashes: Sequence[str], times: int) -> list[str]:
        """Return the pages that exactly `times` sets can have stored."""
        with self._lock:
            elsewhere = self.stored[space]  # this includes the sets of other processes
            return [
                one
                for one in hashes
                if self._offers[space.id, one] == times and one not in elsewhere
            ]

    @property
    def pages_named(self) -> int:
        """The number of pages that all calls name. A page counts once for each call that names it."""
        with self._lock:
            return sum(len(call.pages) for call in self._calls)

    def longest_s(self) -> float:
        """Return how many seconds ago the oldest running call began."""
        with self._lock:
            starts = [call.began_s for call in self._running.values()]
        return time.monotonic() - min(starts) if starts else 0.0

    def sequence(self, *mentioned: str) -> list[str]:
        """Return the last calls, or the last calls that mention any of the words.

        A word is part of a line, or the first 8 digits of a page hash. A clear removes pages
        without naming them, so every clear since the first of these calls is shown too.
        """
        with self._lock:
            calls: list[_Call] = []
            for call in self._calls:
                is_clear = bool(calls) and _CLEAR in call.line
                if not mentioned or is_clear or call.mentions(mentioned):
                    calls.append(call)
            lines = [call.text(mentioned) for call in calls[-_SHOWN_CALLS:]]
        left_out = len(calls) - len(lines)
        return [f"({left_out} calls before)", *lines] if left_out else lines


def _has_verdicts(call: _Call, answer: object) -> bool:
    return isinstance(answer, list) and len(cast("list[object]", answer)) == len(call.pages)


def _words(answer: object) -> str:
    """Return a short text, so that a trace does not keep long listings alive."""
    if not isinstance(answer, list):
        return _short(answer)
    listed = cast("list[object]", answer)
    more = f", ... {len(listed)} in all" if listed[_SHOWN_PAGES:] else ""
    return f"[{', '.join(_short(one) for one in listed[:_SHOWN_PAGES])}{more}]"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
