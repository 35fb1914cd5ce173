"""Call one store of a composition, so that its failures and hangs stay its own.

Each store has a breaker for reads and one for writes. If its call is made on a thread, the caller waits
until a deadline and then leaves the call behind. A write that failed or was left behind may still
arrive, and a delete that was left behind may take a page that was set since. Such pages are in doubt:
they are misses until a set or a delete of them has succeeded that began after that call had ended.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.executor import DaemonExecutor
from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.composition.unopened import is_absent
from hicache_storage.errors import HiCacheError, StorageClosed, StorageTimeout, StorageUnavailable
from hicache_storage.page_store.breaker import Breakers
from hicache_storage.page_store.call_guard import CallGuard
from hicache_storage.page_store.storage_calls import checked_answers

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from concurrent.futures import Future

    from hicache_storage.composition.settings import LimitSettings
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.page_store.breaker import Permit
    from hicache_storage.storage import HiCacheStorage

logger: logging.Logger = logging.getLogger("hicache_storage.composition")

T = TypeVar("T")

_MOST_DOUBTS = 1 << 16
_MOST_OPENED = 4096
"""How many key spaces are remembered as open. Clients choose their number by tenants and salts."""
_LOOKUP_PAGES = 256


@contextmanager
def noting(
    errors: list[Exception], kinds: tuple[type[Exception], ...] = (Exception,)
) -> Generator[None]:
    """Add the error of a call to a member to `errors` if it is of `kinds`. Go on behind the block."""
    try:
        yield
    except kinds as error:  # by default whatever a member raises is its own failure
        errors.append(error)


class PendingCall(Generic[T]):
    """A call to a store on one of its threads. Wait for it with `result`."""

    def __init__(
        self,
        member: Member,
        permit: Permit,
        future: Future[T],
        timeout_s: float,
        *,
        settle: Callable[[T], T],
        leave: Callable[[Future[T]], None],
    ) -> None:
        self.future: Future[T] = future
        """Done when the store does not use the call's memory any more."""
        self._member = member
        self._permit = permit
        self._deadline = Deadline(timeout_s)
        self._settle = settle
        self._leave = leave

    def result(self, *, may_leave: bool = True) -> T:
        """Return the store's answer. Unless the caller `may_leave` the call behind, wait for its end.

        Raises:
            StorageTimeout: There is none at the deadline. The call is left behind, or never begins.
            Exception: The store raised it.
        """
        wait([self.future], self._deadline.remaining_s())
        if not self.future.done():
            if self.future.cancel():
                if self._permit.is_probe:  # the calls that opened the breaker still hang
                    self._permit.fail()
                else:  # other calls occupy the threads: this one says nothing
                    self._permit.dismiss()
                raise self._late()
            self._permit.fail(hung=True)
            if may_leave:
                self._member.counters.add("failed_calls")
                self._leave(self.future)
                raise self._late()
        return self._settle(self.future.result())

    def _late(self) -> StorageTimeout:
        return StorageTimeout(
            f"{self._member.label} did not answer within {self._deadline.timeout_s:g} s"
        )


class Member:
    """One store of a composition. Thread-safe. In a forked child it has threads of its own."""

    def __init__(
        self,
        label: str,
        name: str,
        storage: HiCacheStorage,
        limits: LimitSettings,
        threads: int | None = None,
    ) -> None:
        """Take over `storage`.

        Args:
            label: Names it in messages, such as "tier 'nvme'".
            name: Its name in the config.
            storage: The store.
            limits: The limits of its calls.
            threads: How many calls may run at the same time in each direction. As many as the
                composition's callers, so that none waits for another one's call. By default the
                store's `parallelism`.
        """
        self.label: str = label
        self.name: str = name
        self.storage: HiCacheStorage = storage
        self.counters: Counters = Counters()
        self._limits = limits
        self._threads = threads or storage.capabilities.parallelism
        self._close_by = Deadline(limits.timeout_s)
        self._local = ForkLocal(self._make_local, close=self._close_local)

    def close(self, deadline: Deadline) -> None:
        """End the threads after their calls, until `deadline`, and close the store."""
        self._close_by = deadline
        self._local.close()
        self.storage.close()

    def _close_local(self, local: _Local) -> None:
        local.close(self._close_by)

    @property
    def state(self) -> str:
        """The worse state of the two breakers: `open`, then `half_open`, then `closed`."""
        local = self._local.get()
        return Breakers(local.reads.breaker, local.writes.breaker).state

    def forget_space(self, space_id: str) -> None:
        """Open a key space again before its next set, because it was removed."""
        self._local.get().opened.discard(space_id)

    # --- calls in this thread --------------------------------------------------------------------

    def exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Ask which pages the store has.

        Raises:
            StorageUnavailable: The store has failed before and is not asked now.
            Exception: The store raised it, or its answer is malformed.
        """
        local = self._local.get()
        return self._certain(
            space,
            hashes,
            self._run(local.reads, self._admit(local.reads), self._exists, space, hashes),
        )

    def get(self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Read pages. Raises what `exists` raises."""
        local = self._local.get()
        hits = self._run(local.reads, self._admit(local.reads), self._get, space, hashes, pages)
        return self._certain(space, hashes, hits)

    def set(self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Store pages. Raises what `exists` raises."""
        local = self._local.get()
        ended = local.doubts.ended(space, hashes)
        stored = self._run(local.writes, self._admit(local.writes), self._set, space, hashes, pages)
        return local.doubts.resolve(space, hashes, ended, stored)

    def delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Delete pages. One whose doubtful write has not ended before is not gone.

        Raises what `exists` raises.
        """
        local = self._local.get()
        ended = local.doubts.ended(space, hashes)
        gone = self._run(local.writes, self._admit(local.writes), self._delete, space, hashes)
        return local.doubts.resolve(space, hashes, ended, gone)

    # --- calls on the store's threads ------------------------------------------------------------

    def begin_open(self, space: KeySpace) -> PendingCall[None] | None:
        """Begin to open a key space. Return None if it was opened lately."""
        local = self._local.get()
        if space in local.opened:
            return None
        return self._begin(local.writes, partial(self._open, space), lambda opened: opened)

    def begin_exists(self, space: KeySpace, hashes: Sequence[str]) -> PendingCall[list[bool]]:
        """Begin `exists`. It has `lookup_timeout_s`, or more for many pages."""
        limits = self._limits
        scaled_s = limits.lookup_timeout_s * max(1.0, len(hashes) / _LOOKUP_PAGES)
        return self._begin(
            self._local.get().reads,
            partial(self._exists, space, hashes),
            partial(self._certain, space, hashes),
            min(limits.timeout_s, scaled_s),
        )

    def begin_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> PendingCall[list[bool]]:
        """Begin `get`. The store uses `pages` until the call's `future` is done."""
        return self._begin(
            self._local.get().reads,
            partial(self._get, space, hashes, pages),
            partial(self._certain, space, hashes),
        )

    def begin_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> PendingCall[list[bool]]:
        """Begin `set`. The store uses `pages` until the call's `future` is done."""
        local = self._local.get()
        return self._begin(
            local.writes,
            partial(self._set, space, hashes, pages),
            partial(local.doubts.resolve, space, hashes, local.doubts.ended(space, hashes)),
        )

    def begin_delete(self, space: KeySpace, hashes: Sequence[str]) -> PendingCall[list[bool]]:
        """Begin `delete`. If it is left behind, its pages are in doubt: it may take newer ones."""
        local = self._local.get()
        return self._begin(
            local.writes,
            partial(self._delete, space, hashes),
            partial(local.doubts.resolve, space, hashes, local.doubts.ended(space, hashes)),
            leave=partial(local.doubts.add, space, hashes),
        )

    # --- doubts ----------------------------------------------------------------------------------

    def doubt(
        self, space: KeySpace, hashes: Sequence[str], write: Future[list[bool]] | None = None
    ) -> None:
        """Treat pages as misses, because a write that was given up may still store or delete them.

        `write` is that write if it still runs. The oldest doubts are forgotten beyond 65,536 pages.
        """
        if not is_absent(self.storage):  # what an absent store refused never arrives
            self._local.get().doubts.add(space, hashes, write)

    def doubtful_writes(self, space_id: str) -> int:
        """Return how many pages of a key space are in doubt because of a write that still runs."""
        return self._local.get().doubts.running(space_id)

    def _certain(self, space: KeySpace, hashes: Sequence[str], hits: list[bool]) -> list[bool]:
        return self._local.get().doubts.without(space, hashes, hits)

    # --- parts -----------------------------------------------------------------------------------

    def _exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return checked_answers(self.storage.batch_exists(space, hashes), len(hashes))

    def _get(self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        return checked_answers(self.storage.batch_get(space, hashes, pages), len(hashes))

    def _open(self, space: KeySpace) -> None:
        opened = self._local.get().opened
        if space not in opened:
            self.storage.open_space(space)
            opened.add(space)

    def _set(self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        self._open(space)
        return checked_answers(self.storage.batch_set(space, hashes, pages), len(hashes))

    def _delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return checked_answers(self.storage.batch_delete(space, hashes), len(hashes))

    def _begin(
        self,
        guard: CallGuard,
        call: Callable[[], T],
        settle: Callable[[T], T],
        timeout_s: float | None = None,
        leave: Callable[[Future[T]], None] = lambda _: None,
    ) -> PendingCall[T]:
        permit = self._admit(guard, on_own_thread=True)
        future = self._local.get().executor(guard).submit(partial(self._run, guard, permit, call))
        limit_s = timeout_s or self._limits.timeout_s
        return PendingCall(self, permit, future, limit_s, settle=settle, leave=leave)

    def _admit(self, guard: CallGuard, *, on_own_thread: bool = False) -> Permit:
        # A probe beside a call that hangs would hold one more of the caller's threads: soon all.
        permit = None if guard.overdue() and not on_own_thread else guard.admit()
        if permit is None:
            self.counters.add("refused_calls")
            raise StorageUnavailable(
                f"{self.label} failed, and is not asked for {self._limits.breaker_cooldown_s:g} s"
            )
        return permit

    def _run(
        self, guard: CallGuard, permit: Permit, call: Callable[..., T], *arguments: object
    ) -> T:
        running = guard.begin(permit)
        with permit:
            try:
                result = call(*arguments)
            except Exception as error:
                permit.fail()
                self.counters.add("failed_calls")
                if not isinstance(error, HiCacheError):
                    logger.warning("a call to %s failed", self.label, exc_info=True)
                raise
            finally:
                guard.end(running)
            permit.succeed()
        return result

    def _make_local(self) -> _Local:
        return _Local(self.label, self._threads, self._limits)


class _Local:
    """What belongs to one process: breakers, threads, open key spaces, doubts."""

    def __init__(self, label: str, threads: int, limits: LimitSettings) -> None:
        self.reads, self.writes = (
            CallGuard(
                timeout_s=limits.timeout_s,
                failures=limits.breaker_failures,
                cooldown_s=limits.breaker_cooldown_s,
            )
            for _ in range(2)
        )
        self.opened = _OpenedSpaces()
        self.doubts = _Doubts()
        self._label, self._threads = label, threads
        self._lock = threading.Lock()
        self._is_closed = False
        self._executors: dict[CallGuard, DaemonExecutor] = {}

    def executor(self, guard: CallGuard) -> DaemonExecutor:
        """Return the threads for the calls of `guard`, so that hung writes occupy no reads' threads.

        Raises:
            StorageClosed: The member was closed. A call that was under way then starts no threads.
        """
        found = self._executors.get(guard)
        if found is None:
            with self._lock:
                if self._is_closed:
                    raise StorageClosed(f"{self._label} was closed: open a new store")
                found = self._executors.get(guard)
                if found is None:
                    found = DaemonExecutor(f"hicache {self._label}", self._threads)
                    self._executors[guard] = found
        return found

    def close(self, deadline: Deadline) -> None:
        """End the threads."""
        with self._lock:
            self._is_closed = True
        for executor in self._executors.values():
            if not executor.close(deadline.remaining_s()):
                logger.warning("a call to %s has not ended, and is left behind", self._label)


class _OpenedSpaces:
    """The key spaces that were opened last, at most `_MOST_OPENED`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spaces: OrderedDict[KeySpace, None] = OrderedDict()

    def __contains__(self, space: KeySpace) -> bool:
        return space in self._spaces

    def add(self, space: KeySpace) -> None:
        with self._lock:
            self._spaces[space] = None
            if len(self._spaces) > _MOST_OPENED:
                self._spaces.popitem(last=False)

    def discard(self, space_id: str) -> None:
        with self._lock:
            for space in [space for space in self._spaces if space.id == space_id]:
                del self._spaces[space]


_Writes: TypeAlias = "list[Future[list[bool]]]"
_Ended: TypeAlias = "dict[str, _Writes]"


class _Doubts:
    """The pages that a write may still store or delete, although it was given up. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writes: OrderedDict[tuple[KeySpace, str], _Writes] = OrderedDict()
        """The writes of each page that still ran when it came into doubt. Each doubt is a new list."""

    def add(self, space: KeySpace, hashes: Sequence[str], write: Future[list[bool]] | None) -> None:
        begun = [] if write is None else [write]
        with self._lock:
            for page_hash in hashes:
                before = self._writes.get((space, page_hash), ())
                self._writes[space, page_hash] = [
                    *(one for one in before if not one.done()),
                    *begun,
                ]
            while len(self._writes) > _MOST_DOUBTS:
                self._writes.popitem(last=False)

    def without(self, space: KeySpace, hashes: Sequence[str], hits: list[bool]) -> list[bool]:
        """Take the pages in doubt out of `hits`, and return them."""
        if self._writes:
            with self._lock:
                for n, page_hash in enumerate(hashes):
                    if (space, page_hash) in self._writes:
                        hits[n] = False
        return hits

    def ended(self, space: KeySpace, hashes: Sequence[str]) -> _Ended:
        """Return the doubts whose writes have all ended, so that a delete can remove their pages now."""
        if not self._writes:
            return {}
        with self._lock:
            found = {each: self._writes.get((space, each)) for each in hashes}
        return {
            page_hash: writes
            for page_hash, writes in found.items()
            if writes is not None and all(one.done() for one in writes)
        }

    def resolve(
        self, space: KeySpace, hashes: Sequence[str], ended: _Ended, done: list[bool]
    ) -> list[bool]:
        """Forget those of the doubts `ended` whose pages are set or deleted. False: others are left."""
        if not self._writes:
            return done
        with self._lock:
            return [
                is_done and self._end((space, page_hash), ended.get(page_hash))
                for page_hash, is_done in zip(hashes, done, strict=True)
            ]

    def running(self, space_id: str) -> int:
        """Return how many pages of a key space a write may still store."""
        with self._lock:
            return sum(
                space.id == space_id and not all(one.done() for one in writes)
                for (space, _), writes in self._writes.items()
            )

    def _end(self, key: tuple[KeySpace, str], ended: _Writes | None) -> bool:
        writes = self._writes.get(key)
        if writes is not None and writes is not ended:
            return False
        self._writes.pop(key, None)
        return True
