"""One request on the decode side: completions are awaited while what is there is loaded."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.controller.topic import Topic, shown
from hicache_storage.handoff.polls import Progress

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.controller.controller import CacheController
    from hicache_storage.controller.lease import Lease
    from hicache_storage.handoff.completion import Completion
    from hicache_storage.handoff.polls import Polls
    from hicache_storage.handoff.settings import HandoffSettings
    from hicache_storage.keys import KeySpace


class Ended(Protocol):
    """What is told of a request that has ended."""

    def __call__(self, incoming: HandoffRequest, outcome: str, *, taken: bool) -> None: ...


class HandoffRequest:
    """The pages of a request on their way here: ended by `result`, or by `cancel`.

    `poll`, `result` and `cancel` belong to the engine's thread. With several ranks, every rank makes the
    same calls in the same order: what is done next is agreed on, in one question to all ranks for a
    `poll` of each request that is awaited.
    """

    def __init__(
        self,
        request_id: str,
        hashes: Sequence[str],
        awaited: Mapping[str, KeySpace],
        *,
        controller: CacheController,
        settings: HandoffSettings,
        timeout_s: float,
        polls: Polls,
        ended: Ended,
    ) -> None:
        self.request_id = request_id
        self.hashes = hashes
        self.awaited = awaited
        """The shards whose completion is awaited, by the completions' keys."""
        self.topic = Topic.of_request(request_id, hashes)
        """What the ranks speak of when they speak of this request."""
        self._controller = controller
        self._settings = settings
        self._deadline = Deadline(timeout_s)
        self._polls = polls
        self._ended = ended
        self._completions: dict[str, Completion] = {}
        self._news = threading.Event()
        self._leases: list[Lease] = []
        self._looked_at = 0
        self._next_look_s = time.monotonic() + settings.load_every_s
        self._last_look = False
        self._ready = False
        self._over = False
        self._prefetch = controller.prefetch(request_id, hashes, deadline_s=self._load_s())
        polls.add(self)

    @property
    def completions(self) -> list[Completion]:
        """Those that have come."""
        return list(self._completions.values())

    @property
    def seen(self) -> list[str]:
        """Keys of the completions that have come."""
        return list(self._completions)

    @property
    def missing(self) -> list[str]:
        """Keys of the completions that have not come."""
        return [key for key in self.awaited if key not in self._completions]

    def poll(self) -> bool:
        """Whether it is time for `result`: everything is here, or time is up. Waits for no store.

        Time is up too where the controller was closed.
        """
        if self._ready or self._over:
            return True
        agreed = self._polls.progress(self)
        if not agreed.in_time:
            if agreed.idle and not self._last_look:
                self._look()
            self._ready = True
        elif agreed.idle and self._last_look:
            self._ready = True
        elif agreed.idle and (agreed.everything or not agreed.nothing_new):
            self._look()
            self._last_look = agreed.everything
        if self._ready:
            self._polls.remove(self)
        return self._ready

    def result(self) -> Lease:
        """Wait until `poll` says so, and take the usable prefix, pinned: the rest is to be computed.

        Raises:
            RuntimeError: It was taken or cancelled before.
        """
        if self._over:
            raise RuntimeError(f"the hand-off of request {shown(self.request_id)} was ended before")
        while not self.poll():
            loading = not self._prefetch.complete
            self._news.wait(self._settings.poll_min_s if loading else self._settings.poll_max_s)
            self._news.clear()
        lease = self._prefetch.result(earlier=self._leases)
        self._end("timed_out_requests" if self.missing else "complete_requests", taken=True)
        return lease

    def cancel(self) -> None:
        """Let everything go. Idempotent; does nothing after `result`."""
        if not self._over:
            self._prefetch.cancel()
            self._end("cancelled_requests", taken=False)

    # --- the receiver's side -------------------------------------------------------------------------

    def note(self, found: Mapping[str, Completion]) -> bool:
        """Take those completions that are about this request; whether there were any."""
        mine = {
            key: completion
            for key, completion in found.items()
            if key in self.awaited and completion.is_about(self.awaited[key], self.hashes)
        }
        self._completions |= mine
        if mine:
            self._news.set()
        return bool(mine)

    def give_up(self) -> None:
        """Nothing more will come: time is up."""
        self._deadline = Deadline(0)
        self._news.set()

    # --- steps ---------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """How far it is on this rank."""
        news = len(self._completions) > self._looked_at or time.monotonic() >= self._next_look_s
        return Progress(
            everything=len(self._completions) == len(self.awaited),
            in_time=not (self._deadline.passed() or self._controller.closed),
            idle=self._prefetch.complete,
            nothing_new=not news,
        )

    def _look(self) -> None:
        """Keep what the last prefetch has brought, and begin another."""
        self._looked_at = len(self._completions)
        self._next_look_s = time.monotonic() + self._settings.load_every_s
        self._leases.append(self._prefetch.look())
        self._prefetch = self._controller.prefetch_more(
            self.request_id, self.hashes, deadline_s=self._load_s()
        )

    def _load_s(self) -> float:
        """How long a prefetch that begins now may take."""
        return self._deadline.remaining_s() + self._settings.grace_s

    def _end(self, outcome: str, *, taken: bool) -> None:
        self._over = True
        self._polls.remove(self)
        for held in self._leases:
            held.release()
        self._ended(self, outcome, taken=taken)
