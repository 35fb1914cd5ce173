"""Combine the progress of all awaited requests on all ranks, with one all-reduce for all requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from hicache_storage.controller.ranks import Channel, Topic

if TYPE_CHECKING:
    from hicache_storage.controller.consensus import Consensus


class Progress(NamedTuple):
    """The progress of one request, on this rank or on all ranks."""

    all_completions: bool
    """True if all completions that the request waits for have arrived."""
    in_time: bool
    """True while the request still has time."""
    idle: bool
    """True if no page is being loaded any more."""
    nothing_new: bool
    """True if there is no reason to start another prefetch."""


_LOST = Progress(all_completions=False, in_time=False, idle=False, nothing_new=True)


class Awaited(Protocol):
    """A request that a rank waits for."""

    @property
    def topic(self) -> Topic: ...

    def progress(self) -> Progress:
        """Return the request's progress on this rank."""
        ...


class PollBatch:
    """The requests that one rank waits for, in the order of their start, which is equal on all ranks.

    If a poll finds no stored answer for its request, it asks all ranks about all of these requests, and
    stores each answer for the next poll of that request. An answer is used once. Ranks that poll in the
    same order also ask in the same order. With several ranks, only the engine's thread makes calls.
    """

    def __init__(self, consensus: Consensus) -> None:
        self._consensus = consensus
        self._awaited: dict[Awaited, None] = {}
        self._answers: dict[Awaited, Progress] = {}

    def add(self, awaited: Awaited) -> None:
        """Add a request, which every rank asks about from then on."""
        self._awaited[awaited] = None

    def remove(self, awaited: Awaited) -> None:
        """Remove a request. Idempotent."""
        self._awaited.pop(awaited, None)
        self._answers.pop(awaited, None)

    def progress(self, awaited: Awaited) -> Progress:
        """Return a request's progress on all ranks. If a rank is lost, report that the time is up."""
        if self._consensus.single_rank:
            return awaited.progress()
        if awaited not in self._answers:
            self._answers = self._ask_all()
        return self._answers.pop(awaited)

    def _ask_all(self) -> dict[Awaited, Progress]:
        requests = list(self._awaited)
        topic = Topic.of("the awaited requests", [each.topic.digest for each in requests])
        own = [int(fact) for each in requests for fact in each.progress()]
        common = self._consensus.minimum(Channel.RESULT, topic, "their progress", own)
        if common is None:
            return dict.fromkeys(requests, _LOST)
        width = len(Progress._fields)
        return {
            each: Progress(*map(bool, common[number * width : (number + 1) * width]))
            for number, each in enumerate(requests)
        }
