"""The layer between engines and storages: what every backend needs, written once.

Frames and checksums, hit policies over several pools, splitting and parallelism, one deadline a call,
circuit breakers for reads and writes, and counters by reason. A failure is a counted miss: no method
raises because of what a store did.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.durations import check_seconds
from hicache_storage.errors import StorageTimeout, UnsupportedOperation
from hicache_storage.keys import check_page_hashes
from hicache_storage.page_store.frame import frame_nbytes
from hicache_storage.page_store.hit_policy import HitPolicy, PoolSpec, longest, usable_too
from hicache_storage.page_store.lookup import ExistsQuery, asked_together
from hicache_storage.page_store.results import Match, Outcome, Verdict
from hicache_storage.page_store.scheduling import CallScheduler
from hicache_storage.scalars import check_integer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import HostBuffer
    from hicache_storage.page_store.breaker import Breakers
    from hicache_storage.page_store.results import Transfer
    from hicache_storage.page_store.scheduling import Move
    from hicache_storage.storage import HiCacheStorage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStoreSettings:
    """How a page store treats its storage."""

    checksum: Literal["xxh3", "none"] = "xxh3"
    """With "none" the identity and length of a page are still checked."""
    timeout_s: float = 10.0
    """The deadline of a call, everything included. A storage call that takes longer has failed, also
    where its caller had less patience."""
    parallelism: int | None = None
    """Concurrent calls to the storage in each direction; None: what the storage declares."""
    breaker_failures: int = 3
    """Failed calls in a row, of one direction, after which the store is left alone in that direction."""
    breaker_cooldown_s: float = 5.0

    def __post_init__(self) -> None:
        if self.checksum not in ("xxh3", "none"):
            raise ValueError(f"checksum must be 'xxh3' or 'none', not {self.checksum!r}")
        for name in ("parallelism", "breaker_failures"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least=1)
        for name in ("timeout_s", "breaker_cooldown_s"):
            check_seconds(name, getattr(self, name))


class PageStore:
    """Pages of any number of pools in one storage. Thread-safe; does not own the storage.

    Reads and writes have threads and breakers of their own, so that trouble of one is none of the other.
    Deleting and opening a key space change the store: they go with the writes. A forked child gets
    threads, breakers and counters of its own with its first call; what its parent had begun is not its.
    """

    def __init__(self, storage: HiCacheStorage, settings: PageStoreSettings | None = None) -> None:
        self.storage = storage
        self.settings = settings or PageStoreSettings()
        self.frame_nbytes = frame_nbytes(storage.capabilities.alignment)
        self._framed: dict[KeySpace, KeySpace] = {}
        self._closed = False
        self._close_timeout_s = 0.0
        self._traffic = ForkLocal(
            self._new_traffic, close=lambda traffic: traffic.close(self._close_timeout_s)
        )

    @property
    def breaker(self) -> Breakers:
        """The breakers of `reads` and `writes`, and the worse `state` of both."""
        return self._traffic.get().breakers

    def open_space(self, space: KeySpace) -> None:
        """Make `space` known. Before its first use; idempotent.

        The breaker is not asked and learns nothing: whoever opens wants the store's own answer.

        Raises:
            ValueError: The space has a frame already.
            UnsupportedOperation: Its pages are larger than the storage takes.
            StorageUnavailable, StorageTimeout: The store does not answer.
            StorageClosed: This page store was closed, or its storage was.
        """
        PoolSpec(space=space)
        framed = replace(space, frame_nbytes=self.frame_nbytes)
        limit = self.storage.capabilities.max_page_nbytes
        if limit is not None and framed.stored_nbytes > limit:
            raise UnsupportedOperation(
                f"the storage takes pages of up to {limit} bytes; pool {space.pool!r} stores"
                f" {framed.stored_nbytes}: use a smaller page size"
            )
        lane = self._traffic.get().writes
        future = lane.submit(lambda: self.storage.open_space(framed))
        lane.wait([future], Deadline(self.settings.timeout_s))
        if future.cancelled() or not future.done():
            raise StorageTimeout(
                f"the store did not open a key space within {self.settings.timeout_s} s"
            )
        future.result()
        self._framed[space] = framed

    def framed(self, space: KeySpace) -> KeySpace:
        """`space` as the storage knows it: for calls that the page store does not wrap.

        Raises:
            ValueError: It is not open.
        """
        try:
            return self._framed[space]
        except KeyError:
            raise ValueError(
                f"key space of pool {space.pool!r} is not open: call open_space first"
            ) from None

    def match(
        self,
        hashes: Sequence[str],
        pools: Sequence[PoolSpec],
        *,
        held: Sequence[Sequence[bool]] | None = None,
        past_gaps: bool = False,
        timeout_s: float | None = None,
    ) -> Match:
        """The longest prefix of `hashes` that the storage says it has in every pool.

        Pools are asked one after another, each only for the prefix that those before it left; parts of
        one pool, next to each other and of the same name, all at once behind the first of them. `held`
        tells for each pool and page what the caller has: it counts as present, and is not asked for.

        A pool that needs all pages is asked in growing blocks, up to its first gap; a trailing pool, and
        with `past_gaps` every pool, for all pages at once. What was answered before the deadline counts.

        Raises:
            ValueError: No pool, or a malformed hash.
        """
        check_page_hashes(hashes)
        if not pools:
            raise ValueError("a prefix needs at least one pool")
        framed = [self.framed(pool.space) for pool in pools]
        usable = [True] * (len(hashes) + 1)
        present: list[list[bool]] = []
        failures: list[Verdict | None] = []
        with self._traffic.get().inquiry(self._deadline(timeout_s)) as inquiry:
            for together in asked_together(pools):
                questions = [
                    ExistsQuery(
                        framed[number],
                        hashes,
                        held=None if held is None else held[number],
                        pages=longest(usable),
                        past_gaps=past_gaps or pools[number].hit_policy is not HitPolicy.ALL_PAGES,
                    )
                    for number in together
                ]
                inquiry.ask(questions)
                for number, question in zip(together, questions, strict=True):
                    present.append(question.there)
                    failures.append(question.failure)
                    usable = usable_too(usable, pools[number], question.there)
        return Match(longest(usable), usable, present, failures)

    def present(
        self, space: KeySpace, hashes: Sequence[str], *, timeout_s: float | None = None
    ) -> list[bool | None]:
        """For each of any hashes, in any order: is its page there? None: the store could not say.

        Raises:
            ValueError: A key space that is not open, or a malformed hash.
        """
        check_page_hashes(hashes)
        question = ExistsQuery(self.framed(space), hashes, pages=len(hashes), past_gaps=True)
        with self._traffic.get().inquiry(self._deadline(timeout_s)) as inquiry:
            inquiry.ask([question])
        return question.answers

    def load(self, transfers: Sequence[Transfer], *, timeout_s: float | None = None) -> Outcome:
        """Read pages and prove each of them. Only an OK page holds what was asked for.

        Pages that turn out to be wrong are deleted, within the same deadline, so that the next save
        heals them.

        Raises:
            ValueError: A transfer that does not fit its key space, or a malformed hash.
        """
        deadline = self._deadline(timeout_s)
        outcome = self._traffic.get().load(self._moves(transfers), deadline)
        self._heal(transfers, outcome, deadline)
        return outcome

    def save(self, transfers: Sequence[Transfer], *, timeout_s: float | None = None) -> Outcome:
        """Frame and store pages. The payloads must not change until `settled` is done.

        Raises:
            ValueError: A transfer that does not fit its key space, or a malformed hash.
        """
        return self._traffic.get().save(self._moves(transfers), self._deadline(timeout_s))

    def delete(
        self, space: KeySpace, hashes: Sequence[str], *, timeout_s: float | None = None
    ) -> int:
        """Remove pages; how many of them are gone for certain. Those that never were there count too.

        Raises:
            ValueError: A key space that is not open, or a malformed hash.
        """
        check_page_hashes(hashes)
        traffic = self._traffic.get()
        gone = traffic.delete({self.framed(space): hashes}, self._deadline(timeout_s))
        traffic.counters.add("deleted_pages", gone)
        return gone

    def register_buffer(self, buffer: HostBuffer) -> None:
        """Announce host memory that pages and headers live in."""
        self.storage.register_buffer(buffer)

    def unregister_buffer(self, buffer: HostBuffer) -> None:
        """The end of `register_buffer`."""
        self.storage.unregister_buffer(buffer)

    def stats(self) -> dict[str, int]:
        """Counters since the start: `{load,save}_{verdict}` pages, bytes, healed pages, trips.

        `breaker_opened` is the sum of `read_breaker_opened` and `write_breaker_opened`.
        """
        traffic = self._traffic.get()
        return {
            **traffic.counters.snapshot(),
            "breaker_opened": traffic.breakers.times_opened,
            "read_breaker_opened": traffic.breakers.reads.times_opened,
            "write_breaker_opened": traffic.breakers.writes.times_opened,
        }

    def close(self, timeout_s: float = 10.0) -> None:
        """End the threads; the storage stays open, and later calls fail at once. Idempotent."""
        if not self._closed:
            self._closed = True
            self._close_timeout_s = timeout_s
            self._traffic.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- parts ---------------------------------------------------------------------------------------

    def _new_traffic(self) -> CallScheduler:
        traffic = CallScheduler(self.storage, self.settings)
        if self._closed:  # before the fork
            traffic.close(0)
        return traffic

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self.settings.timeout_s if timeout_s is None else timeout_s)

    def _moves(self, transfers: Sequence[Transfer]) -> list[Move]:
        for transfer in transfers:
            self._check(transfer)
        return [(self.framed(transfer.space), transfer) for transfer in transfers]

    def _heal(self, transfers: Sequence[Transfer], outcome: Outcome, deadline: Deadline) -> None:
        """Delete what was proved wrong: stores that keep the first bytes would keep it for ever."""
        wrong: dict[KeySpace, list[str]] = {}
        for transfer, verdicts in zip(transfers, outcome.verdicts, strict=True):
            found = [
                page_hash
                for page_hash, verdict in zip(transfer.hashes, verdicts, strict=True)
                if verdict in _PROVED_WRONG
            ]
            if found:
                wrong.setdefault(self.framed(transfer.space), []).extend(found)
        if not wrong:
            return
        traffic = self._traffic.get()
        left_s = deadline.remaining_s()
        # What the reads have left of the time: that they took most of it is no failure of the writes.
        deleted = traffic.delete(wrong, Deadline(left_s)) if left_s else 0
        traffic.counters.add("wrong_pages_deleted", deleted)
        left = sum(map(len, wrong.values())) - deleted
        if left:
            logger.warning("%d wrong pages could not be deleted", left)

    def _check(self, transfer: Transfer) -> None:
        self.framed(transfer.space)
        check_page_hashes(transfer.hashes)
        if len(transfer.pages) != len(transfer.hashes):
            raise ValueError(f"{len(transfer.hashes)} hashes but {len(transfer.pages)} pages")
        wanted = (self.frame_nbytes, transfer.space.page_nbytes)
        for page in transfer.pages:
            if (len(page.header), page.payload.nbytes) != wanted:
                raise ValueError(
                    f"pool {transfer.space.pool!r} needs a header of {wanted[0]} bytes and a payload of"
                    f" {wanted[1]}, not {len(page.header)} and {page.payload.nbytes}"
                )


_PROVED_WRONG = frozenset({Verdict.CORRUPT, Verdict.WRONG_KEY, Verdict.WRONG_SIZE})
