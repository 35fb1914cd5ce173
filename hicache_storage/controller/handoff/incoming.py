"""One request on the decode side: completions are awaited while what is there is loaded."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from hicache_storage.controller.ranks import Channel, RanksLost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.controller.controller import CacheController
    from hicache_storage.controller.handoff.completion import Completion
    from hicache_storage.controller.handoff.settings import HandoffSettings
    from hicache_storage.controller.lease import Lease
    from hicache_storage.controller.prefetch import Prefetch
    from hicache_storage.keys import KeySpace


class _Agreed(NamedTuple):
    """What all ranks of the engine say about the request."""

    everything: bool
    """Each has seen all completions that it waits for."""
    in_time: bool
    """No one's time is up."""
    idle: bool
    """Nothing is being loaded any more."""
    look: bool
    """One or another has reason to see what can be loaded by now."""


class Incoming:
    """The pages of a request on their way here: ended by `result`, or by `cancel`.

    `poll`, `result` and `cancel` belong to the engine's thread. With several ranks, every rank makes the
    same calls in the same order: what is done next is agreed in each `poll`.
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
        ended: Callable[[Incoming, str], None],
    ) -> None:
        self.request_id = request_id
        self.hashes = hashes
        self.awaited = awaited
        """The shards whose completion is awaited, by the completions' keys."""
        self._controller = controller
        self._settings = settings
        self._deadline_s = time.monotonic() + timeout_s
        self._ended = ended
        self._completions: dict[str, Completion] = {}
        self._news = threading.Event()
        self._leases: list[Lease] = []
        self._looked_at = 0
        self._next_look_s = time.monotonic() + settings.load_every_s
        self._last_look = False
        self._ready = False
        self._over = False
        self._prefetch = self._begin()

    @property
    def completions(self) -> list[Completion]:
        """Those that have come."""
        return list(self._completions.values())

    @property
    def missing(self) -> list[str]:
        """Keys of the completions that have not come."""
        return [key for key in self.awaited if key not in self._completions]

    def poll(self) -> bool:
        """Whether it is time for `result`: everything is here, or time is up. Waits for no store."""
        if self._ready:
            return True
        agreed = self._agree()
        if not agreed.in_time:
            if agreed.idle and not self._last_look:
                self._look()
            self._ready = True
        elif agreed.idle and self._last_look:
            self._ready = True
        elif agreed.idle and (agreed.everything or agreed.look):
            self._look()
            self._last_look = agreed.everything
        return self._ready

    def result(self) -> Lease:
        """Wait until `poll` says so, and take the usable prefix, pinned: the rest is to be computed.

        Raises:
            RuntimeError: It was taken or cancelled before.
        """
        if self._over:
            raise RuntimeError(f"the hand-off of request {self.request_id!r} was ended before")
        while not self.poll():
            loading = not self._prefetch.complete
            self._news.wait(self._settings.poll_min_s if loading else self._settings.poll_max_s)
            self._news.clear()
        lease = self._prefetch.result(earlier=self._leases)
        self._end("timed_out_requests" if self.missing else "complete_requests")
        return lease

    def cancel(self) -> None:
        """Let everything go. Idempotent; does nothing after `result`."""
        if not self._over:
            self._prefetch.cancel()
            self._end("cancelled_requests")

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
        self._deadline_s = time.monotonic()
        self._news.set()

    # --- steps ---------------------------------------------------------------------------------------

    def _agree(self) -> _Agreed:
        now_s = time.monotonic()
        look = len(self._completions) > self._looked_at or now_s >= self._next_look_s
        own = [
            len(self._completions) == len(self.awaited),
            now_s < self._deadline_s,
            self._prefetch.complete,
            not look,
        ]
        try:
            everything, in_time, idle, no_look = self._controller.ranks.minimum(
                Channel.RESULT, list(map(int, own))
            )
        except RanksLost:  # which the controller will say, and give nothing
            return _Agreed(everything=False, in_time=False, idle=False, look=False)
        return _Agreed(bool(everything), bool(in_time), bool(idle), not no_look)

    def _look(self) -> None:
        """Keep what the last prefetch has brought, and begin another."""
        self._looked_at = len(self._completions)
        self._next_look_s = time.monotonic() + self._settings.load_every_s
        self._leases.append(self._prefetch.look())
        self._prefetch = self._begin()

    def _begin(self) -> Prefetch:
        left_s = max(0.0, self._deadline_s - time.monotonic()) + self._settings.grace_s
        return self._controller.prefetch(self.request_id, self.hashes, deadline_s=left_s)

    def _end(self, outcome: str) -> None:
        self._over = True
        for held in self._leases:
            held.release()
        self._ended(self, outcome)
