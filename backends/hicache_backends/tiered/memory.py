"""The memory of copies between tiers: bounded, reused, and free when its last user has ended."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from hicache_storage.backend_support.byte_limit import ByteLimit
from hicache_storage.backend_support.page_buffers import PageBuffers
from hicache_storage.errors import StorageClosed, StorageTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from typing import Any

    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.backend_support.page_buffers import Buffer
    from hicache_storage.composition.member import Member, PendingCall
    from hicache_storage.errors import HiCacheError
    from hicache_storage.page import Page
    from hicache_storage.storage import HiCacheStorage

T = TypeVar("T")

_SHARES = 4
"""One call takes at most this part of the memory at once, so that calls work side by side."""


class CopyMemory:
    """Memory for copies of pages, `limit_nbytes` at most. Thread-safe.

    Half of it is for copies that nobody waits for. The calls of one lower tier have at most that tier's
    share of it, so one that hangs leaves memory to the others. A page that is larger than a limit gets
    its memory if no other copy has any.
    """

    def __init__(
        self, storage: HiCacheStorage, limit_nbytes: int, lower_tiers: Sequence[Member]
    ) -> None:
        self._used = ByteLimit(limit_nbytes)
        self._of_tiers = {
            member: ByteLimit(limit_nbytes // len(lower_tiers)) for member in lower_tiers
        }
        self._unawaited = ByteLimit(limit_nbytes // 2)
        self._closed = False
        self._share_nbytes = limit_nbytes // _SHARES
        self._buffers = PageBuffers(storage, most_kept=_SHARES)

    @property
    def used_nbytes(self) -> int:
        """The bytes of copies now."""
        return self._used.nbytes

    def most_pages(self, nbytes: int) -> int:
        """Return how many pages of `nbytes` one `take` may have."""
        return max(1, self._share_nbytes // self._buffers.stride_nbytes(nbytes))

    def take(self, count: int, nbytes: int, timeout_s: float) -> Room | None:
        """Return room for `count` pages, or None if there is none within `timeout_s`."""
        taken_nbytes = count * self._buffers.stride_nbytes(nbytes)
        if not self._used.acquire(taken_nbytes, timeout_s):
            return None
        try:
            buffer = self._buffers.take(count, nbytes)
        except BaseException:
            self._used.release(taken_nbytes)
            raise
        pages = buffer.pages(count, nbytes, self._buffers.stride_nbytes(nbytes))
        return Room(self, buffer, pages, taken_nbytes)

    def lend(
        self,
        room: Room,
        member: Member,
        begin: Callable[[], PendingCall[T]],
        deadline: Deadline,
    ) -> PendingCall[T]:
        """Begin a call of a tier that uses `room` until it has ended.

        Raises:
            StorageTimeout: Other calls of this tier have all of its share. A tier that works gets until
                `deadline` to end them.
            Exception: `begin` raised it.
        """
        share = self._of_tiers.get(member)
        if share is None:
            call = begin()
        else:
            wait_s = deadline.remaining_s() if member.state == "closed" else 0.0
            if not share.acquire(room.nbytes, wait_s):
                raise self.refusal()
            try:
                call = begin()
            except BaseException:
                share.release(room.nbytes)
                raise
            call.future.add_done_callback(lambda _: share.release(room.nbytes))
        room.use_until(call.future)
        return call

    def refusal(self) -> HiCacheError:
        """Return the error of a call that got no room."""
        if self._closed:
            return StorageClosed("this TieredStorage was closed: open a new one")
        return StorageTimeout("tiered: no memory for copies became free in time")

    def let_go(self, room: Room) -> bool:
        """Return True if the copies in `room` may stay although nobody waits for them."""
        room.is_unawaited = room.is_unawaited or self._unawaited.acquire(room.nbytes, 0.0)
        return room.is_unawaited

    def free(self, room: Room, buffer: Buffer) -> None:
        """Reuse the memory of `room`. Only the room itself calls this."""
        self._buffers.put_back(buffer)
        self._used.release(room.nbytes)
        if room.is_unawaited:
            self._unawaited.release(room.nbytes)

    def close(self) -> None:
        """Release the memory that no copy uses, and the rest when its copies have ended."""
        self._closed = True
        for limit in (self._used, *self._of_tiers.values()):
            limit.close()
        self._buffers.close()


class Room:
    """Memory for some pages, until each of its users has ended."""

    def __init__(self, memory: CopyMemory, buffer: Buffer, pages: list[Page], nbytes: int) -> None:
        self.pages: list[Page] = pages
        self.nbytes: int = nbytes
        self.is_unawaited: bool = False
        self._memory = memory
        self._buffer = buffer
        self._users = 1
        self._lock = threading.Lock()

    def use_until(self, future: Future[Any]) -> None:
        """Keep the memory until `future` is done."""
        with self._lock:
            self._users += 1
        future.add_done_callback(lambda _: self.release())

    def release(self) -> None:
        """Note that a user has ended. The first one is who took the room."""
        with self._lock:
            self._users -= 1
            is_last = not self._users
        if is_last:
            self._memory.free(self, self._buffer)
