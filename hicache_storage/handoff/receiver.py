"""The decode side: it reads the completions of all awaited requests together, and deletes used ones."""

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
from hicache_storage.handoff.poll_batch import PollBatch
from hicache_storage.handoff.request import HandoffRequest
from hicache_storage.handoff.settings import HandoffSettings
from hicache_storage.scalars import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from hicache_storage.controller.controller import CacheController
    from hicache_storage.page_store import PageStore

logger: logging.Logger = logging.getLogger(__name__)

_BACKOFF = 1.5


class HandoffReceiver:
    """The receiver of one rank of a decode engine. Thread-safe.

    No method raises or blocks because a store fails. A rank waits for one completion for each key space
    of its own pools. It does not need the number or the names of the writers.
    """

    def __init__(
        self,
        controller: CacheController,
        store: PageStore,
        settings: HandoffSettings | None = None,
    ) -> None:
        """Open the completions' key space in `store`, which also holds the controller's pages.

        Raises:
            StorageUnavailable, StorageTimeout, UnsupportedOperation: The key space could not be opened.
        """
        self.settings: HandoffSettings = settings or HandoffSettings()
        self._controller = controller
        self._store = store
        self._shards = [part.space for pool in controller.cache.pools for part in pool.stored]
        self._completions = CompletionStore(
            store, controller.cache.pools[0].space, stale_after_s=self.settings.stale_after_s
        )
        self._polls = PollBatch(controller.consensus)
        self._counters = Counters()
        self._changed = threading.Condition()
        self._awaited: list[HandoffRequest] = []
        self._expected_count = 0
        self._closed = False
        self._cleanup = DaemonExecutor("hicache-handoff-clean", 1)
        self._thread = threading.Thread(target=self._run, name="hicache-handoff-watch", daemon=True)
        self._thread.start()

    def expect(
        self, request_id: str, hashes: Sequence[str], *, timeout_s: float | None = None
    ) -> HandoffRequest:
        """Start to wait for the pages of a request that another engine computes.

        Args:
            request_id: The id under which the prefill side publishes the request.
            hashes: The hashes of all full pages of the prompt, as on the prefill side.
            timeout_s: How long to wait, instead of the timeout in the settings.

        Raises:
            ValueError: A page hash is malformed.
            StorageClosed: The receiver or its controller was closed.
        """
        if self._closed:
            raise StorageClosed("this hand-off receiver was closed: create a new one")
        shards = self._shards if hashes else []
        request = HandoffRequest(
            request_id,
            hashes,
            {completion_hash(request_id, space, hashes): space for space in shards},
            controller=self._controller,
            settings=self.settings,
            timeout_s=self.settings.timeout_s if timeout_s is None else timeout_s,
            polls=self._polls,
            on_end=self._on_end,
        )
        with self._changed:
            self._awaited.append(request)
            self._expected_count += 1
            closed = self._closed
            self._changed.notify_all()
        if closed:  # `close` did not see this request
            request.expire()
        return request

    def stats(self) -> dict[str, int]:
        """Return counters since the start: how requests ended, and how many completions were seen."""
        return self._counters.snapshot()

    def close(self, timeout_s: float = 10.0) -> bool:
        """End the threads after the queued deletions. Return False after `timeout_s`. Idempotent.

        Requests that still wait get the pages that have arrived.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            awaited = list(self._awaited)
        for request in awaited:
            request.expire()
        deadline = Deadline(timeout_s)
        self._thread.join(deadline.remaining_s())
        cleaned_up = self._cleanup.close(deadline.remaining_s())
        return cleaned_up and not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the end of a request ------------------------------------------------------------------------

    def _on_end(self, request: HandoffRequest, outcome: str, *, taken: bool) -> None:
        with self._changed:
            self._awaited.remove(request)
        self._counters.add(outcome)
        if taken:
            seen = request.seen
            self._submit_cleanup(lambda: self._delete_used(request, seen))

    def _delete_used(self, request: HandoffRequest, seen: Sequence[str]) -> None:
        """Delete the completions that were seen and, if the settings say so, the request's pages.

        Another rank may have deleted them already. Completions of a canceled request stay, because
        another decode engine may be waiting for them. Such completions become stale later.
        """
        self._completions.remove(seen)
        if self.settings.delete_pages:
            for space in request.awaited.values():
                self._store.delete(space, request.hashes)

    def _submit_cleanup(self, task: Callable[[], object]) -> None:
        self._cleanup.submit(task).add_done_callback(_log_failure)

    # --- the lookup thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s, next_sweep_s, known = self.settings.poll_min_s, time.monotonic(), 0
        while not self._closed:
            if time.monotonic() >= next_sweep_s:
                next_sweep_s = time.monotonic() + self.settings.stale_after_s
                self._submit_cleanup(self._completions.sweep)
            expected = self._wait(known, pause_s)
            found = self._read_completions()
            longer_s = min(pause_s * _BACKOFF, self.settings.poll_max_s)
            pause_s = self.settings.poll_min_s if found or expected > known else longer_s
            known = expected

    def _wait(self, known: int, pause_s: float) -> int:
        """Wait until the pause ends, or more than `known` requests are expected. Return their number."""
        with self._changed:
            limit_s = pause_s if self._awaited else self.settings.stale_after_s
            self._changed.wait_for(lambda: self._closed or self._expected_count > known, limit_s)
            return self._expected_count

    def _read_completions(self) -> bool:
        """Read all awaited completions in one call. Return True if any were found."""
        with self._changed:
            awaited = list(self._awaited)
        keys = [key for request in awaited for key in request.missing]
        if not keys or self._closed:
            return False
        try:
            found = self._completions.read(keys)
        except Exception:
            logger.exception("%s could not be looked up", counted(len(keys), "completion"))
            return False
        self._counters.add("seen_completions", len(found))
        return sum(request.add_completions(found) for request in awaited) > 0


def _log_failure(task: Future[object]) -> None:
    if error := task.exception():
        logger.error("the deletions after a hand-off failed: %s", error, exc_info=error)
