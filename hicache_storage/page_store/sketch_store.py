"""Keep the sketch of an admission in the store itself, so that it survives restarts."""

from __future__ import annotations

import hashlib
import logging
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from hicache_storage.errors import UnsupportedOperation
from hicache_storage.page import Page
from hicache_storage.page_store.results import Transfer, Verdict
from hicache_storage.page_store.sketch import FILTERS, state_of

if TYPE_CHECKING:
    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store.admission import Admission
    from hicache_storage.page_store.store import PageStore

logger: logging.Logger = logging.getLogger(__name__)

POOL = "admission"
_LAYOUT = "page_sketch_1"
# Each filter is saved to two pages in turn, so that one of them is whole while the other is replaced.
_PAGES = 2 * FILTERS
_HASHES = [hashlib.sha256(f"hicache-{_LAYOUT}-{n}".encode()).hexdigest() for n in range(_PAGES)]
_INTERVAL_S = 60.0
_RETRY_S = 5.0
_UNANSWERED = frozenset(
    (
        *(Verdict.TIMEOUT, Verdict.UNAVAILABLE, Verdict.PART_UNAVAILABLE),
        *(Verdict.BREAKER_OPEN, Verdict.ERROR),
    )
)


class SketchStore:
    """A thread that restores a sketch from a store, and saves changes every minute and at the end.

    The thread's name is `hicache-admission`. The key space is that of the engine's pages with another
    pool, so equal engines share one sketch: the sketch that was saved last. If the process is killed,
    the pages of the last minute are lost. If the store cannot hold a page of this size, a restart loses
    the sketch.
    """

    def __init__(
        self,
        store: PageStore,
        admission: Admission,
        owner: KeySpace,
        *,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        """Use `store`, which must outlive this object, and a key space of the engine's pages.

        Raises:
            ValueError: The admission does not have a sketch.
        """
        nbytes = admission.stored_nbytes
        if nbytes is None:
            raise ValueError("an admission without second_use has no record to save")
        self.space: KeySpace = replace(
            owner, pool=POOL, layout=_LAYOUT, dtype="uint8", page_tokens=1, page_nbytes=nbytes
        )
        self._store = store
        self._admission = admission
        self._saved: dict[int, tuple[int, int]] = {}
        self._next_page = list(range(FILTERS))
        self._interval_s = interval_s
        self._closing = threading.Event()
        self._restored = self._warned = False
        self._thread = threading.Thread(target=self._run, name="hicache-admission", daemon=True)

    def start(self) -> None:
        """Start the thread, which restores the sketch first."""
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Save the sketch and end the thread. Return False if it still runs after `timeout_s`."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                self._sync()
            except UnsupportedOperation as error:
                logger.warning(
                    "this store cannot save the record of offered pages, so a restart loses it: %s",
                    error,
                )
                return
            except Exception as error:  # noqa: BLE001 - the next turn tries again
                self._warn(error)
            if self._closing.wait(self._interval_s if self._restored else _RETRY_S):
                with suppress(Exception):  # a last failure must not delay the end
                    self._sync()
                return

    def _sync(self) -> None:
        if not self._restored:
            self._store.open_space(self.space)
            self._restored = self._restore()
        if self._restored:
            for number, state in enumerate(self._admission.states()):
                if state != self._saved.get(number, (state[0], 0)):
                    self._save(number, state)

    def _restore(self) -> bool:
        """Add the stored filters. Return False if the store did not answer for each of them."""
        pages = [Page(bytearray(self.space.page_nbytes)) for _ in range(_PAGES)]
        verdicts = self._store.load([Transfer(self.space, _HASHES, pages)]).verdicts[0]
        dumps = [
            page.tobytes() if verdict is Verdict.OK else b""
            for page, verdict in zip(pages, verdicts, strict=True)
        ]
        states = [state_of(dump) for dump in dumps]
        for number in range(FILTERS):
            self._next_page[number] = min(number, number + FILTERS, key=states.__getitem__)
        usable, saved = self._admission.restore(dumps)
        if usable:
            logger.info("the record of offered pages was loaded from the store")
            self._saved = dict(enumerate(saved))
        return not _UNANSWERED.intersection(verdicts)

    def _save(self, number: int, state: tuple[int, int]) -> None:
        """Replace the older page of a filter: delete it first, because many stores do not overwrite."""
        page_hash = _HASHES[self._next_page[number]]
        self._store.delete(self.space, [page_hash])
        outcome = self._store.save(
            [Transfer(self.space, [page_hash], [Page(self._admission.dump(number))])]
        )
        if outcome.verdicts == [[Verdict.OK]]:
            self._saved[number] = state
            self._next_page[number] = (self._next_page[number] + FILTERS) % _PAGES

    def _warn(self, error: Exception) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        logger.log(level, "the record of offered pages could not be saved in the store: %s", error)
        self._warned = True
