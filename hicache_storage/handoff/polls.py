"""How far the awaited requests are on all ranks: one question serves a poll of each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from hicache_storage.controller.ranks import Channel
from hicache_storage.controller.topic import Topic

if TYPE_CHECKING:
    from hicache_storage.controller.consensus import Agreement


class Progress(NamedTuple):
    """How far one request is: on this rank, or on all of them."""

    everything: bool
    """All completions that it waits for have come."""
    in_time: bool
    """Its time is not up."""
    idle: bool
    """Nothing is being loaded any more."""
    nothing_new: bool
    """There is no reason to see what can be loaded by now."""


_LOST = Progress(everything=False, in_time=False, idle=False, nothing_new=True)


class Awaited(Protocol):
    """A request that is awaited."""

    @property
    def topic(self) -> Topic: ...

    def progress(self) -> Progress:
        """As far as this rank knows."""
        ...


class Polls:
    """The requests that one rank awaits, in the order in which all ranks began to.

    A poll that finds no answer asks all ranks about all of these requests, and leaves the answers of the
    others for their next polls. An answer is used once: who polls again asks again. Ranks that poll in
    the same order ask in the same order. With several ranks one thread makes all calls, the engine's.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._awaited: dict[Awaited, None] = {}
        self._answers: dict[Awaited, Progress] = {}

    def add(self, awaited: Awaited) -> None:
        """Ask about it from now on."""
        self._awaited[awaited] = None

    def remove(self, awaited: Awaited) -> None:
        """Ask about it no more. Idempotent."""
        self._awaited.pop(awaited, None)
        self._answers.pop(awaited, None)

    def progress(self, awaited: Awaited) -> Progress:
        """How far it is on all ranks; where these are lost, its time is up."""
        if self._agreement.alone:
            return awaited.progress()
        if awaited not in self._answers:
            self._answers = self._ask()
        return self._answers.pop(awaited)

    def _ask(self) -> dict[Awaited, Progress]:
        everybody = list(self._awaited)
        topic = Topic.of("the awaited requests", [each.topic.digest for each in everybody])
        own = [int(fact) for each in everybody for fact in each.progress()]
        common = self._agreement.everywhere(Channel.RESULT, topic, "their progress", own)
        if common is None:
            return dict.fromkeys(everybody, _LOST)
        width = len(Progress._fields)
        return {
            each: Progress(*map(bool, common[number * width : (number + 1) * width]))
            for number, each in enumerate(everybody)
        }
