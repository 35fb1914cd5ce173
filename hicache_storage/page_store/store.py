"""The page store: what an engine calls to find, load, save and delete pages.

It adds to every storage frames and checksums, hit policies over several pools, splitting and
parallelism, one deadline for each call, circuit breakers for reads and writes, and counters by reason.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Self

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.errors import StorageTimeout, UnsupportedOperation
from hicache_storage.keys import check_page_hashes
from hicache_storage.page_store.begun import Waiting, finish
from hicache_storage.page_store.counters import (
    BREAKER_OPENED,
    DELETED_PAGES,
    READ_BREAKER_OPENED,
    WRITE_BREAKER_OPENED,
)
from hicache_storage.page_store.frame import frame_nbytes
from hicache_storage.page_store.healing import delete_wrong_pages
from hicache_storage.page_store.lookup import (
    ExistsQuery,
    HitPolicy,
    PoolSpec,
    PrefixLookup,
    longest,
    narrow_usable,
    query_groups,
)
from hicache_storage.page_store.lookup_batches import LookupBatches
from hicache_storage.page_store.observer import (
    NO_ACTIVITY,
    Clearance,
    Deletion,
    Lookup,
    Move,
    Observers,
)
from hicache_storage.page_store.results import Match, Outcome, Verdict
from hicache_storage.page_store.settings import PageStoreSettings
from hicache_storage.page_store.spaces import OpenSpaces
from hicache_storage.page_store.storage_calls import Lanes
from hicache_storage.scalars import format_exact_nbytes

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import HostBuffer
    from hicache_storage.page_store.begun import Begun
    from hicache_storage.page_store.breaker import Breakers
    from hicache_storage.page_store.call_durations import Histogram, Operation
    from hicache_storage.page_store.observer import Activity, Attributes, Observer
    from hicache_storage.page_store.results import Transfer
    from hicache_storage.page_store.storage_calls import FramedTransfer
    from hicache_storage.storage import HiCacheStorage

logger: logging.Logger = logging.getLogger("hicache_storage.page_store")

# A limit, because clients choose the number of key spaces by their tenants and salts.
_MOST_FRAMED = 4096


class PageStore:
    """A store that finds, loads, saves and deletes pages of many pools in one storage. Thread-safe.

    If the store fails, you get verdicts and counters, not exceptions; `open_space` and `clear` do raise.
    `load` and `save` wait. `begin_load`, `begin_save` and `begin_lookup` return a future at once.
    Reads and writes have separate threads and breakers, so a failure in one direction does not stop the
    other. Deletes and `open_space` count as writes.

    Every call refuses a key space whose pages are larger than the storage accepts. In a forked child,
    the first call makes new threads, breakers and counters, and no key space is open; calls that the
    parent has begun stay in the parent.

    Examples:
        >>> from hicache_storage import KeySpace, Page, Shard, open_storage, page_hashes
        >>> from hicache_storage.page_store import PageStore, PoolSpec, Transfer
        >>> space = KeySpace(model="my/model", dtype="bfloat16", layout="page_first", page_tokens=2,
        ...                  page_nbytes=4, shard=Shard(layers=(0, 1)))
        >>> hashes = page_hashes([1, 2, 3, 4], page_tokens=2)
        >>> with open_storage("memory") as storage, PageStore(storage) as store:
        ...     store.open_space(space)
        ...     store.save([Transfer(space, hashes[:1], [Page(b"kv!!")])]).arrived()
        ...     store.match(hashes, [PoolSpec(space=space)]).pages
        1
        1
    """

    def __init__(
        self,
        storage: HiCacheStorage,
        settings: PageStoreSettings | None = None,
        *,
        observers: Iterable[Observer] = (),
    ) -> None:
        """Make a page store over an open storage. Close the storage and the observers yourself."""
        self.storage = storage
        self.settings: PageStoreSettings = settings or PageStoreSettings()
        self.frame_nbytes: int = frame_nbytes(storage.capabilities.alignment)
        limit = storage.capabilities.max_page_nbytes
        self._framed = lru_cache(_MOST_FRAMED)(partial(_framed, self.frame_nbytes, limit))
        self._observers = Observers(observers)
        self._closed = False
        self._close_timeout_s = 0.0
        self._lanes = ForkLocal(
            self._new_lanes, close=lambda lanes: lanes.close(self._close_timeout_s)
        )
        self._lookups = ForkLocal(
            lambda: LookupBatches(self._lanes.get().calls, self._ask, self.framed),
            close=lambda _: None,
        )

    @property
    def breaker(self) -> Breakers:
        """The breakers of `reads` and `writes`. Its `state` is the worse of their states."""
        return self._lanes.get().breakers

    @property
    def lends_memory(self) -> bool:
        """True if the storage accesses your pages themselves, so that registering them pays off."""
        return self._lanes.get().reads.loans.lends

    def open_space(self, space: KeySpace) -> None:
        """Open `space` before its first save. Idempotent. A save opens it, too, but without its error.

        The breakers neither refuse nor count this call, so you get the store's own answer.

        Raises:
            ValueError: The space already has a frame.
            UnsupportedOperation: The pages are larger than the storage accepts.
            StorageUnavailable, StorageTimeout: The store does not answer.
            StorageClosed: This page store or its storage was closed.
        """
        framed, limit_s = self.framed(space), self.settings.writes_s
        lanes = self._lanes.get()
        future = lanes.writes.submit(partial(lanes.spaces.open, framed))
        Waiting([future], Deadline(limit_s)).wait()
        if future.cancelled() or not future.done():
            raise StorageTimeout(f"the store did not open a key space within {limit_s} s")
        future.result()

    def framed(self, space: KeySpace) -> KeySpace:
        """Return `space` with its frame, for calls to the storage itself.

        Raises:
            ValueError: The space already has a frame.
            UnsupportedOperation: The pages are larger than the storage accepts.
        """
        return self._framed(space)

    def has_space(self, space: KeySpace) -> bool:
        return self.framed(space) in self._lanes.get().spaces

    def match(
        self,
        hashes: Sequence[str],
        pools: Sequence[PoolSpec],
        *,
        held: Sequence[Sequence[bool]] | None = None,
        past_gaps: bool = False,
        timeout_s: float | None = None,
    ) -> Match:
        """Find the longest prefix of `hashes` that the storage reports in every pool.

        Pools are queried one after another, each only for the prefix that all earlier pools have.
        Adjacent pools of one name are parts of one pool; after the first part, the others are queried
        together. `held` is True for each pool and page that you already have. Such a page counts as
        present and is not queried.

        A pool that needs all pages is queried in growing blocks, up to its first gap. A trailing pool
        is queried for all pages at once, and with `past_gaps` every pool is. Answers that arrive before
        the deadline count.

        Raises:
            ValueError: There is no pool, or a hash is malformed.
        """
        check_page_hashes(hashes)
        if not pools:
            raise ValueError("a prefix needs at least one pool")
        framed = [self.framed(pool.space) for pool in pools]
        began_ns = self._observers.now_ns()
        usable = [True] * (len(hashes) + 1)
        asked: list[ExistsQuery] = []
        with self._lookup(self._lookup_deadline(timeout_s)) as lookup:
            for group in query_groups(pools):
                queries = [
                    ExistsQuery(
                        framed[number],
                        hashes,
                        held=None if held is None else held[number],
                        pages=longest(usable),
                        past_gaps=past_gaps or pools[number].hit_policy is not HitPolicy.ALL_PAGES,
                    )
                    for number in group
                ]
                finish(lookup.query(queries))
                for number, query in zip(group, queries, strict=True):
                    usable = narrow_usable(usable, pools[number], query.present)
                asked += queries
        if self._observers:
            spaces = [pool.space for pool in pools]
            self._report_lookup(spaces, hashes, asked, longest(usable), began_ns)
        return Match(
            longest(usable),
            usable,
            [query.present for query in asked],
            [query.failure for query in asked],
        )

    def present(
        self, space: KeySpace, hashes: Sequence[str], *, timeout_s: float | None = None
    ) -> list[bool | None]:
        """Return, for each hash, whether the storage has the page, or None if it gave no answer.

        Hashes may be in any order.

        Raises:
            ValueError: A hash is malformed.
        """
        return self._answered(space, hashes, timeout_s).answers

    def lookup(
        self, space: KeySpace, hashes: Sequence[str], *, timeout_s: float | None = None
    ) -> list[Verdict]:
        """Return OK, MISS, or the reason for no answer, for each hash. Hashes may be in any order.

        Raises:
            ValueError: A hash is malformed.
        """
        return self._answered(space, hashes, timeout_s).verdicts

    def load(self, transfers: Sequence[Transfer], *, timeout_s: float | None = None) -> Outcome:
        """Read pages and check each of them. Only a page with the verdict OK holds the requested bytes.

        When the call returns or raises, nothing touches the pages any more, however late the storage is.
        Wrong pages are deleted within the same deadline, so that the next save replaces them.

        Raises:
            ValueError: A transfer does not match its key space, or a hash is malformed.
        """
        return finish(self._load(transfers, self._deadline(timeout_s)))

    def save(self, transfers: Sequence[Transfer], *, timeout_s: float | None = None) -> Outcome:
        """Frame and store pages. Do not change the payloads until the call returns.

        The first save to a key space opens it. Call `open_space` before, for the store's own error.

        Raises:
            ValueError: A transfer does not match its key space, or a hash is malformed.
        """
        return finish(self._save(transfers, self._write_deadline(timeout_s)))

    def begin_lookup(
        self,
        queries: Sequence[tuple[KeySpace, Sequence[str]]],
        *,
        timeout_s: float | None = None,
    ) -> Future[list[list[Verdict]]]:
        """Begin to look pages up. The future has what `lookup` returns, for each query.

        The call never waits, and raises nothing: errors are the future's. The future is done at the
        deadline at the latest. Its callbacks must not block. Lookups that wait are answered together.
        """
        return self._lookups.get().begin(queries, self._lookup_deadline(timeout_s))

    def begin_load(
        self,
        transfers: Sequence[Transfer],
        *,
        timeout_s: float | None = None,
        activity: Activity = NO_ACTIVITY,
    ) -> Begun[Outcome]:
        """Begin a `load`, as `begin_lookup` begins a lookup.

        The pages are lent until the future is done; nothing touches them afterwards. `activity` is the
        task that the load belongs to.
        """
        deadline = self._deadline(timeout_s)
        return self._lanes.get().calls.begin(self._load(transfers, deadline, activity), deadline)

    def begin_save(
        self,
        transfers: Sequence[Transfer],
        *,
        timeout_s: float | None = None,
        activity: Activity = NO_ACTIVITY,
    ) -> Begun[Outcome]:
        """Begin a `save`, as `begin_load` begins a load.

        Saves that were begun are moved in order, two at a time, and none of them begins while a load
        that was begun waits for a thread.
        """
        deadline = self._write_deadline(timeout_s)
        return self._lanes.get().calls.begin(
            self._save(transfers, deadline, activity), deadline, background=True
        )

    def end_begun(self) -> None:
        """End the calls that were begun, as if their deadlines had passed."""
        self._lanes.get().calls.expire()

    def delete(
        self, space: KeySpace, hashes: Sequence[str], *, timeout_s: float | None = None
    ) -> int:
        """Remove pages. Return how many are certainly gone or were never there.

        Raises:
            ValueError: A hash is malformed.
        """
        check_page_hashes(hashes)
        lanes = self._lanes.get()
        began_ns = self._observers.now_ns()
        wanted, deadline = {self.framed(space): hashes}, self._write_deadline(timeout_s)
        gone = finish(lanes.writes.delete(wanted, deadline))
        lanes.counters.add(DELETED_PAGES, len(gone))
        if self._observers:
            deletion = Deletion(space, hashes, gone)
            self._observers.notify(lambda observer: observer.deleted(deletion, began_ns))
        return len(gone)

    def clear(self, space: KeySpace) -> int:
        """Remove all pages of a key space, and nothing else. Return the number of these pages.

        You get the store's own answer: neither a deadline nor the breakers apply.

        Raises:
            UnsupportedOperation: The storage cannot list its pages.
            StorageUnavailable, StorageTimeout: The store does not answer; pages may be left.
        """
        began_ns = self._observers.now_ns()
        pages = self.storage.clear(self.framed(space))
        if self._observers:
            clearance = Clearance(space, pages)
            self._observers.notify(lambda observer: observer.cleared(clearance, began_ns))
        return pages

    def begin_activity(self, name: str, attributes: Attributes) -> Activity:
        """Begin a task to which calls of this page store can belong.

        The result does nothing unless an observer traces calls.
        """
        return self._observers.begin(name, attributes)

    @property
    def open_spaces(self) -> tuple[int, int]:
        """How many key spaces are open, and how often a save could not open one."""
        spaces = self._lanes.get().spaces
        return len(spaces), spaces.failed

    def private_nbytes(self) -> tuple[int, int]:
        """Return the size of the private memory, and how much of it storage calls use now."""
        memories = [lane.loans.memory for lane in self._lanes.get().both]
        return sum(one.nbytes for one in memories), sum(one.used_nbytes for one in memories)

    def register_buffer(self, buffer: HostBuffer) -> None:
        """Register host memory that holds pages with the storage."""
        self.storage.register_buffer(buffer)

    def unregister_buffer(self, buffer: HostBuffer) -> None:
        """Undo `register_buffer`."""
        self.storage.unregister_buffer(buffer)

    def stats(self) -> dict[str, int]:
        """Return the counters since the start: pages by verdict, bytes, deleted pages, opened breakers.

        Their names are in `hicache_storage.page_store.counters`.
        """
        lanes = self._lanes.get()
        return {
            **self._observers.stats(),
            **lanes.counters.snapshot(),
            BREAKER_OPENED: lanes.breakers.times_opened,
            READ_BREAKER_OPENED: lanes.breakers.reads.times_opened,
            WRITE_BREAKER_OPENED: lanes.breakers.writes.times_opened,
        }

    def durations(self) -> Mapping[tuple[Operation, Verdict], Histogram]:
        """Return how long calls took since the start, by operation and worst verdict of a page."""
        return self._lanes.get().durations.snapshot()

    def close(self, timeout_s: float = 10.0) -> None:
        """End the threads. The storage stays open, and later calls fail at once. Idempotent."""
        if not self._closed:
            self._closed = True
            self._close_timeout_s = timeout_s
            self._lanes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- parts ---------------------------------------------------------------------------------------

    def _new_lanes(self) -> Lanes:
        lanes = Lanes(OpenSpaces(self.storage), self.settings)
        if self._closed:  # by the parent, before the fork
            lanes.close(0)
        return lanes

    def _answered(
        self, space: KeySpace, hashes: Sequence[str], timeout_s: float | None
    ) -> ExistsQuery:
        check_page_hashes(hashes)
        (query,) = finish(self._ask([(space, hashes)], self._lookup_deadline(timeout_s)))
        return query

    def _ask(
        self, queries: Sequence[tuple[KeySpace, Sequence[str]]], deadline: Deadline
    ) -> Generator[Waiting, None, list[ExistsQuery]]:
        began_ns = self._observers.now_ns()
        asked = [
            ExistsQuery(self.framed(space), hashes, pages=len(hashes), past_gaps=True)
            for space, hashes in queries
        ]
        with self._lookup(deadline) as lookup:
            yield from lookup.query(asked)
        if self._observers:
            for (space, hashes), query in zip(queries, asked, strict=True):
                self._report_lookup([space], hashes, [query], None, began_ns)
        return asked

    def _load(
        self, transfers: Sequence[Transfer], deadline: Deadline, activity: Activity = NO_ACTIVITY
    ) -> Generator[Waiting, None, Outcome]:
        began_ns = self._observers.now_ns()
        framed, lanes = self._framed_transfers(transfers), self._lanes.get()
        outcome = yield from lanes.reads.move(framed, deadline)
        yield from delete_wrong_pages(lanes, framed, outcome, deadline)
        self._report_move(Move("load", transfers, outcome), began_ns, activity)
        return outcome

    def _save(
        self, transfers: Sequence[Transfer], deadline: Deadline, activity: Activity = NO_ACTIVITY
    ) -> Generator[Waiting, None, Outcome]:
        began_ns = self._observers.now_ns()
        framed = self._framed_transfers(transfers)
        outcome = yield from self._lanes.get().writes.move(framed, deadline)
        self._report_move(Move("save", transfers, outcome), began_ns, activity)
        return outcome

    def _report_move(self, move: Move, began_ns: int, activity: Activity) -> None:
        if self._observers:
            with activity.resume():
                self._observers.notify(lambda observer: observer.moved(move, began_ns))

    def _lookup(self, deadline: Deadline) -> PrefixLookup:
        hang_s = self.settings.lookup_timeout_s
        return PrefixLookup(self.storage, self._lanes.get(), deadline, hang_s)

    def _lookup_deadline(self, timeout_s: float | None) -> Deadline:
        return self._deadline(self.settings.lookup_timeout_s if timeout_s is None else timeout_s)

    def _report_lookup(
        self,
        spaces: Sequence[KeySpace],
        hashes: Sequence[str],
        queries: Sequence[ExistsQuery],
        prefix_pages: int | None,
        began_ns: int,
    ) -> None:
        lookup = Lookup(
            spaces,
            hashes,
            [query.answers for query in queries],
            [query.failure for query in queries],
            prefix_pages,
        )
        self._observers.notify(lambda observer: observer.looked_up(lookup, began_ns))

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self.settings.timeout_s if timeout_s is None else timeout_s)

    def _write_deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self.settings.writes_s if timeout_s is None else timeout_s)

    def _framed_transfers(self, transfers: Sequence[Transfer]) -> list[FramedTransfer]:
        for transfer in transfers:
            self._check(transfer)
        return [(self.framed(transfer.space), transfer) for transfer in transfers]

    def _check(self, transfer: Transfer) -> None:
        check_page_hashes(transfer.hashes)
        if len(transfer.pages) != len(transfer.hashes):
            raise ValueError(f"{len(transfer.hashes)} hashes but {len(transfer.pages)} pages")
        expected = transfer.space.page_nbytes
        for page in transfer.pages:
            if page.nbytes != expected:
                raise ValueError(
                    f"pool {transfer.space.pool!r} needs pages of {expected} bytes, not {page.nbytes}"
                )


def _framed(frame_nbytes: int, limit: int | None, space: KeySpace) -> KeySpace:
    PoolSpec(space=space)  # `PoolSpec` refuses a key space that has a frame
    framed = replace(space, frame_nbytes=frame_nbytes)
    if limit is not None and framed.stored_nbytes > limit:
        raise UnsupportedOperation(
            f"the storage takes pages of up to {format_exact_nbytes(limit)}, but those of pool"
            f" {space.pool!r} have {format_exact_nbytes(framed.stored_nbytes)}: use a smaller page size"
        )
    return framed
