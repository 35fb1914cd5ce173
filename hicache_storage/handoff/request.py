"""A request on the decode side, which waits for completions and loads the pages that are in storage."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.controller.ranks import Topic, shown_id
from hicache_storage.handoff.poll_batch import Progress

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.controller.controller import CacheController
    from hicache_storage.controller.lease import Lease
    from hicache_storage.handoff.completion import Completion
    from hicache_storage.handoff.poll_batch import PollBatch
    from hicache_storage.handoff.settings import HandoffSettings
    from hicache_storage.keys import KeySpace


class OnEnd(Protocol):
    """A callback that is called when a request has ended."""

    def __call__(self, request: HandoffRequest, outcome: str, *, taken: bool) -> None: ...


class HandoffRequest:
    """A request whose pages come from another engine. End it with `result` or `cancel`.

    Only the engine's thread calls `poll`, `result` and `cancel`. With several ranks, every rank makes
    the same calls in the same order. The ranks agree on the next step, and one all-reduce serves a
    `poll` of each awaited request.
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
        polls: PollBatch,
        on_end: OnEnd,
    ) -> None:
        self.request_id = request_id
        self.hashes = hashes
        self.awaited = awaited
        """The key spaces of the completions to wait for, by the completions' keys."""
        self.topic: Topic = Topic.of_request(request_id, hashes)
        """The topic under which ranks ask each other about the request."""
        self._controller = controller
        self._settings = settings
        self._deadline = Deadline(timeout_s)
        self._polls = polls
        self._on_end = on_end
        self._completions: dict[str, Completion] = {}
        self._changed = threading.Event()
        self._leases: list[Lease] = []
        self._loaded_completions = 0
        self._next_load_s = time.monotonic() + settings.load_every_s
        self._last_load = False
        self._ready = False
        self._ended = False
        self._prefetch = controller.prefetch(request_id, hashes, deadline_s=self._load_timeout_s())
        polls.add(self)

    @property
    def completions(self) -> list[Completion]:
        """Completions that have arrived."""
        return list(self._completions.values())

    @property
    def seen(self) -> list[str]:
        """Keys of the completions that have arrived."""
        return list(self._completions)

    @property
    def missing(self) -> list[str]:
        """Keys of the completions that have not arrived."""
        return [key for key in self.awaited if key not in self._completions]

    def poll(self) -> bool:
        """Return True if `result` would not wait, because all pages are loaded or time is up.

        The call never waits for a store. The time is also up if the controller is closed.
        """
        if self._ready or self._ended:
            return True
        agreed = self._polls.progress(self)
        if not agreed.in_time:
            if agreed.idle and not self._last_load:
                self._load_again()
            self._ready = True
        elif agreed.idle and self._last_load:
            self._ready = True
        elif agreed.idle and (agreed.all_completions or not agreed.nothing_new):
            self._load_again()
            self._last_load = agreed.all_completions
        if self._ready:
            self._polls.remove(self)
        return self._ready

    def result(self) -> Lease:
        """Wait until `poll` returns True. Return a lease of the usable prefix.

        Compute the rest yourself.

        Raises:
            RuntimeError: The result was already taken, or the request was canceled.
        """
        if self._ended:
            raise RuntimeError(
                f"the hand-off of request {shown_id(self.request_id)} has already ended"
            )
        while not self.poll():
            loading = not self._prefetch.complete
            self._changed.wait(self._settings.poll_min_s if loading else self._settings.poll_max_s)
            self._changed.clear()
        lease = self._prefetch.result(earlier=self._leases)
        self._end("timed_out_requests" if self.missing else "complete_requests", taken=True)
        return lease

    def cancel(self) -> None:
        """End the request and unpin its pages. Idempotent. Do nothing after `result`."""
        if not self._ended:
            self._prefetch.cancel()
            self._end("cancelled_requests", taken=False)

    # --- calls of the receiver -----------------------------------------------------------------------

    def add_completions(self, found: Mapping[str, Completion]) -> bool:
        """Add the completions that match this request. Return True if any match."""
        own = {
            key: completion
            for key, completion in found.items()
            if key in self.awaited and completion.matches(self.awaited[key], self.hashes)
        }
        self._completions |= own
        if own:
            self._changed.set()
        return bool(own)

    def expire(self) -> None:
        """End the waiting time now, because no more completions will arrive."""
        self._deadline = Deadline(0)
        self._changed.set()

    # --- progress ------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """Return the request's progress on this rank."""
        new = (
            len(self._completions) > self._loaded_completions
            or time.monotonic() >= self._next_load_s
        )
        return Progress(
            all_completions=len(self._completions) == len(self.awaited),
            in_time=not (self._deadline.passed() or self._controller.closed),
            idle=self._prefetch.complete,
            nothing_new=not new,
        )

    def _load_again(self) -> None:
        """Keep the pages that the last prefetch loaded, and start another prefetch."""
        self._loaded_completions = len(self._completions)
        self._next_load_s = time.monotonic() + self._settings.load_every_s
        self._leases.append(self._prefetch.take_local())
        self._prefetch = self._controller.prefetch_again(
            self.request_id, self.hashes, deadline_s=self._load_timeout_s()
        )

    def _load_timeout_s(self) -> float:
        """Return how long a prefetch that starts now may take."""
        return self._deadline.remaining_s() + self._settings.grace_s

    def _end(self, outcome: str, *, taken: bool) -> None:
        self._ended = True
        self._polls.remove(self)
        for lease in self._leases:
            lease.release()
        self._on_end(self, outcome, taken=taken)
