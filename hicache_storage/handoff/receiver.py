"""The decode side: looks for the completions of all requests at once, and clears up behind them."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Self

from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.executor import DaemonExecutor
from hicache_storage.errors import StorageClosed
from hicache_storage.handoff.completion import completion_hash
from hicache_storage.handoff.completion_store import CompletionStore
from hicache_storage.handoff.polls import Polls
from hicache_storage.handoff.request import HandoffRequest
from hicache_storage.handoff.settings import HandoffSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from hicache_storage.controller.controller import CacheController
    from hicache_storage.page_store import PageStore

logger = logging.getLogger(__name__)

_BACKOFF = 1.5


class HandoffReceiver:
    """One rank of a decode engine. Thread-safe; nothing that a store does raises or blocks here.

    A rank waits for one completion of each shard that it reads: the key spaces of its own pools. It need
    not know how many ranks wrote them, nor which.
    """

    def __init__(
        self,
        controller: CacheController,
        store: PageStore,
        settings: HandoffSettings | None = None,
    ) -> None:
        """Open the completions' key space in `store`, which holds the controller's pages.

        Raises:
            StorageUnavailable, StorageTimeout, UnsupportedOperation: From opening the key space.
        """
        self.settings = settings or HandoffSettings()
        self._controller = controller
        self._store = store
        self._shards = [part.space for pool in controller.cache.pools for part in pool.stored]
        self._board = CompletionStore(
            store, controller.cache.pools[0].space, stale_after_s=self.settings.stale_after_s
        )
        self._polls = Polls(controller.agreement)
        self._counters = Counters()
        self._changed = threading.Condition()
        self._waiting: list[HandoffRequest] = []
        self._expected = 0
        self._closed = False
        self._cleaning = DaemonExecutor("hicache-handoff-clean", 1)
        self._watching = threading.Thread(
            target=self._watch, name="hicache-handoff-watch", daemon=True
        )
        self._watching.start()

    def expect(
        self, request_id: str, hashes: Sequence[str], *, timeout_s: float | None = None
    ) -> HandoffRequest:
        """Begin to wait for the pages of a request that another engine computes.

        Args:
            request_id: As the prefill side knows it.
            hashes: Of all full pages of the prompt, as the prefill side has them.
            timeout_s: Instead of the settings'.

        Raises:
            ValueError: A malformed page hash.
            StorageClosed: The receiver or its controller was closed.
        """
        if self._closed:
            raise StorageClosed("this hand-off receiver was closed: make a new one")
        shards = self._shards if hashes else []
        incoming = HandoffRequest(
            request_id,
            hashes,
            {completion_hash(request_id, space, hashes): space for space in shards},
            controller=self._controller,
            settings=self.settings,
            timeout_s=self.settings.timeout_s if timeout_s is None else timeout_s,
            polls=self._polls,
            ended=self._finish,
        )
        with self._changed:
            self._waiting.append(incoming)
            self._expected += 1
            closed = self._closed
            self._changed.notify_all()
        if closed:  # meanwhile: nobody looks for its completions
            incoming.give_up()
        return incoming

    def stats(self) -> dict[str, int]:
        """Requests since the start by how they ended, and completions seen."""
        return self._counters.snapshot()

    def close(self, timeout_s: float = 10.0) -> bool:
        """End the threads once what was asked for is cleared up; False where that takes longer.

        Requests that still wait take what is there. Idempotent.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            waiting = list(self._waiting)
        for incoming in waiting:
            incoming.give_up()
        deadline = Deadline(timeout_s)
        self._watching.join(deadline.remaining_s())
        cleaned = self._cleaning.close(deadline.remaining_s())
        return cleaned and not self._watching.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the end of a request ------------------------------------------------------------------------

    def _finish(self, incoming: HandoffRequest, outcome: str, *, taken: bool) -> None:
        with self._changed:
            self._waiting.remove(incoming)
        self._counters.add(outcome)
        if taken:
            seen = incoming.seen
            self._clean(lambda: self._clear_up(incoming, seen))

    def _clear_up(self, incoming: HandoffRequest, seen: Sequence[str]) -> None:
        """The completions that were seen go, and by option the request's pages. Others may have done it.

        A request that was cancelled is not cleared up: it may be another decode engine's by now, which
        waits for its completions. What nobody takes is stale one day.
        """
        self._board.remove(seen)
        if self.settings.delete_pages:
            for space in incoming.awaited.values():
                self._store.delete(space, incoming.hashes)

    def _clean(self, task: Callable[[], object]) -> None:
        self._cleaning.submit(task).add_done_callback(_log_failure)

    # --- the watching thread -------------------------------------------------------------------------

    def _watch(self) -> None:
        pause_s, next_sweep_s, seen = self.settings.poll_min_s, time.monotonic(), 0
        while not self._closed:
            if time.monotonic() >= next_sweep_s:
                next_sweep_s = time.monotonic() + self.settings.stale_after_s
                self._clean(self._board.sweep)
            asked = self._pause(seen, pause_s)
            news = self._look()
            longer_s = min(pause_s * _BACKOFF, self.settings.poll_max_s)
            pause_s = self.settings.poll_min_s if news or asked > seen else longer_s
            seen = asked

    def _pause(self, seen: int, pause_s: float) -> int:
        """Until it is time to look again, or more than `seen` requests were asked for; how many were."""
        with self._changed:
            limit_s = pause_s if self._waiting else self.settings.stale_after_s
            self._changed.wait_for(lambda: self._closed or self._expected > seen, limit_s)
            return self._expected

    def _look(self) -> bool:
        """Read all completions that are awaited, in one go; whether there were any."""
        with self._changed:
            waiting = list(self._waiting)
        keys = [key for incoming in waiting for key in incoming.missing]
        if not keys or self._closed:
            return False
        try:
            found = self._board.read(keys)
        except Exception:
            logger.exception("%d completions could not be looked for", len(keys))
            return False
        self._counters.add("seen_completions", len(found))
        return sum(incoming.note(found) for incoming in waiting) > 0


def _log_failure(task: Future[object]) -> None:
    if error := task.exception():
        logger.error("clearing up after a hand-off failed: %s", error, exc_info=error)
