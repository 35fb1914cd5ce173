"""The index for many hosts, in a Redis server. The server contains no pages."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hicache_backends.hf3fs.index import redis_scripts as scripts
from hicache_backends.hf3fs.index.base import Index, lease_s
from hicache_backends.hf3fs.index.redis_client import RedisClient
from hicache_backends.hf3fs.index.redis_epoch import Epoch
from hicache_backends.hf3fs.index.redis_reader import (
    RedisReader,
    place_of,
    prefix_of,
    replaced,
    require_same,
)
from hicache_backends.hf3fs.layout import FILE_NBYTES, Place
from hicache_backends.hf3fs.writer import is_dead, tokens
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import StorageUnavailable
from hicache_storage.settings import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Mapping, Sequence

    from hicache_backends.hf3fs.index.base import Entry, Limits, View
    from hicache_backends.hf3fs.index.redis_epoch import IndexId
    from hicache_backends.hf3fs.layout import Layout
    from hicache_backends.hf3fs.slot_files import SlotFiles
    from hicache_backends.hf3fs.writer import Writer

_STEP = 500


class RedisIndex(RedisReader, Index):
    """An index that all hosts with the same root share.

    A dead writer's slots become free when its lease ends.
    """

    def __init__(
        self, url: str, layout: Layout, limits: Limits, writer: Writer, timeout_s: float
    ) -> None:
        self._limits = limits
        self._writer = writer
        self._layout = layout
        self._lease_ms = int(1000 * lease_s(timeout_s))
        self._unsettled: list[tuple[str, Place]] = []
        self._unsettled_lock = threading.Lock()
        client = RedisClient(url)
        try:
            with client.call(Deadline(timeout_s)) as server:
                server.info(
                    "server"
                )  # fails if there is no server, before `root_id` writes the root's name
            prefix = prefix_of(layout.root_id())
        except BaseException:
            client.close()
            raise
        epoch = Epoch(client, prefix, layout, self._lease_ms, timeout_s)
        super().__init__(client, prefix, epoch, timeout_s)
        try:
            epoch.require_own(Deadline(timeout_s))
            epoch.require(Deadline(timeout_s), at_open=True)
            self.used_nbytes = self._run(Deadline(timeout_s), scripts.USED, parse=int)
            for token in tokens(layout.writers) - {writer.token}:
                is_dead(layout.writers, token, 0)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def writing(self, files: SlotFiles, deadline: Deadline) -> Generator[View, None, None]:
        with self.view(files, deadline) as view:
            yield view

    def reserve(self, files: SlotFiles, count: int, deadline: Deadline) -> list[Place]:
        stamps = [self._writer.stamp() for _ in range(count)]
        limits, geometry = self._limits, files.geometry
        arguments = [
            *(geometry.space.id, geometry.slot_nbytes, count),
            -1 if limits.capacity_nbytes is None else limits.capacity_nbytes,
            *(limits.high_watermark, limits.low_watermark, self._lease_ms),
            *(stamp.hex() for stamp in stamps),
        ]
        self._release_unsettled(deadline)
        index = self._epoch.require(deadline)
        with (
            self._client.call(deadline) as client,
            client.pipeline(transaction=True) as pipe,
        ):
            pipe.eval(scripts.RESERVE, 1, self._prefix, *arguments)
            pipe.info("server")
            (slots, before, fresh, evicted, used), info = pipe.execute()
            require_same(info["run_id"], index.run)
            places = [Place(slot, stamp) for slot, stamp in zip(slots, stamps, strict=False)]
        self.evicted += evicted
        self.used_nbytes = used
        if fresh:
            try:
                files.grow(before, fresh, limits.free_nbytes(used))
            except BaseException:
                self._add_unsettled(geometry.space.id, places)
                raise
        return places

    def settle(
        self,
        files: SlotFiles,
        entries: Sequence[Entry],
        unused: Sequence[Place],
        deadline: Deadline,
    ) -> None:
        space_id = files.geometry.space.id
        arguments = [
            field
            for page_hash, (slot, stamp), used_ns in entries
            for field in (page_hash, slot, stamp.hex(), used_ns // 1000)
        ]
        until = self._renewal_deadline()
        try:
            doubles, lost = self._run(
                *(deadline, scripts.SETTLE, space_id, self._lease_ms),
                *(*_clock_us([entry.used_ns for entry in entries]), *arguments),
                parse=_settled,
            )
            self._relinquish(files, doubles, files.invalidate, until, deadline)
            self._release(space_id, unused, deadline)
        except BaseException:
            self._add_unsettled(space_id, [*(entry.place for entry in entries), *unused])
            raise
        if lost:
            raise StorageUnavailable(
                f"hf3fs: {counted(lost, 'page')} took longer than a lease"
                f" of {self._lease_ms / 1000:.0f} s: raise timeout_s"
            )

    def reclaim(self, space_id: str, places: Sequence[Place]) -> None:
        """Do nothing. The server frees the slots when their leases end."""

    def forget(self, files: SlotFiles, wrong: Mapping[str, Place], deadline: Deadline) -> None:
        arguments = [
            field for h, place in wrong.items() for field in (h, place.slot, place.stamp.hex())
        ]
        self._run(deadline, scripts.FORGET, files.geometry.space.id, *arguments)

    def delete(self, files: SlotFiles, hashes: Sequence[str], deadline: Deadline) -> None:
        index = self._epoch.require(deadline)
        for start in range(0, len(hashes), _STEP):
            part = hashes[start : start + _STEP]
            self._remove(files, part, files.invalidate, index, deadline)

    def clear(self, files: SlotFiles) -> int:
        index = self._epoch.require(Deadline(self._timeout_s))
        removed = 0
        for part in self._page_lists(files):
            for start in range(0, len(part), _STEP):
                hashes = part[start : start + _STEP]
                removed += self._remove(files, hashes, files.deallocate, index, None)
        self._deallocate_free_slots(files)
        if self._epoch.require(Deadline(self._timeout_s)) != index:
            raise replaced()
        return removed

    def drop(self, space_id: str, deadline: Deadline, *, keep_pages: bool) -> int:
        """Remove a key space.

        A writer that reserves slots meanwhile gets them in files with other numbers.
        """
        arguments = (space_id, int(keep_pages), FILE_NBYTES)
        dropped: tuple[int, int, int] = self._run(
            deadline, scripts.DROP, *arguments, parse=_numbers
        )
        pages, files, slots = dropped
        if pages < 0:
            return 0
        self._layout.remove_slots(space_id, files)
        if self._layout.remove_space_dir(space_id):
            self._run(deadline, scripts.DROPPED, space_id, slots)
        return pages

    def touch(self, used: Mapping[tuple[str, str], int], deadline: Deadline) -> None:
        arguments = [
            field
            for (space, page_hash), ns in used.items()
            for field in (f"{space} {page_hash}", ns // 1000)
        ]
        times_us = _clock_us(used.values())
        self._run(deadline, scripts.TOUCH, *times_us, *arguments)

    # --- parts ---------------------------------------------------------------------------------------

    def _renewal_deadline(self) -> Deadline:
        """Return the deadline by which a lease that begins now must be renewed or given up."""
        return Deadline(self._lease_ms / 2000)

    def _remove(
        self,
        files: SlotFiles,
        hashes: Sequence[str],
        act: Callable[[Sequence[int], Deadline], int],
        index: IndexId,
        deadline: Deadline | None,
    ) -> int:
        """Remove pages and call `act` on their leased slots. Return how many of the pages existed.

        Without `deadline` each step has its own deadline.
        """
        until = self._renewal_deadline()
        arguments = (files.geometry.space.id, self._lease_ms, index.maker, *hashes)
        step = deadline or Deadline(self._timeout_s)
        places: list[Place] | None = self._run(step, scripts.DETACH, *arguments, parse=_detached)
        if places is None:
            raise replaced()
        self._relinquish(files, places, act, until, deadline)
        return len(places)

    def _relinquish(
        self,
        files: SlotFiles,
        places: Sequence[Place],
        act: Callable[[Sequence[int], Deadline], int],
        until: Deadline,
        deadline: Deadline | None,
    ) -> None:
        """Call `act` on leased slots, then release them. Renew leases when half of their time is over.

        If this process was stopped and a lease has ended in the meantime, do not act on the slot.

        Raises:
            StorageUnavailable: A lease had ended, and its slot may already belong to another page.
        """
        space_id = files.geometry.space.id
        while places:
            done = act([place.slot for place in places], until)
            self._release(space_id, places[:done], deadline or Deadline(self._timeout_s))
            places = places[done:]
            if not places:
                return
            until = self._renewal_deadline()
            values = [f"{place.slot} {place.stamp.hex()}" for place in places]
            step = deadline or Deadline(self._timeout_s)
            arguments = (space_id, self._lease_ms, *values)
            if self._run(step, scripts.RENEW, *arguments, parse=len) < len(places):
                raise StorageUnavailable(
                    f"hf3fs: slots were held for longer than a lease of {self._lease_ms / 1000:.0f}"
                    " s: try again, and raise timeout_s"
                )

    def _deallocate_free_slots(self, files: SlotFiles) -> None:
        space_id, last = files.geometry.space.id, -1
        while True:
            until = self._renewal_deadline()
            stamp = self._writer.stamp()
            arguments = (space_id, self._lease_ms, _STEP, stamp.hex(), last)
            slots: list[int] = self._run(
                Deadline(self._timeout_s), scripts.LEASE_FREE, *arguments, parse=_slots
            )
            if not slots:
                return
            leased = [Place(slot, stamp) for slot in slots]
            self._relinquish(files, leased, files.deallocate, until, None)
            last = slots[-1]

    def _release(self, space_id: str, places: Sequence[Place], deadline: Deadline) -> None:
        for start in range(0, len(places), _STEP):
            part = places[start : start + _STEP]
            arguments = [field for place in part for field in (place.slot, place.stamp.hex())]
            self.used_nbytes = self._run(deadline, scripts.RELEASE, space_id, *arguments, parse=int)

    def _add_unsettled(self, space_id: str, places: Sequence[Place]) -> None:
        with self._unsettled_lock:
            self._unsettled += [(space_id, place) for place in places]

    def _release_unsettled(self, deadline: Deadline) -> None:
        """Release slots whose `settle` failed."""
        with self._unsettled_lock:
            unsettled, self._unsettled = self._unsettled, []
        while unsettled:
            space_id, place = unsettled[-1]
            try:
                self._release(space_id, [place], deadline)
            except BaseException:
                with self._unsettled_lock:
                    self._unsettled += unsettled
                raise
            unsettled.pop()


# --- results of scripts ------------------------------------------------------------------------------


def _clock_us(times_ns: Collection[int]) -> tuple[int, int]:
    """Return the time of this host, and the earliest of these times."""
    now_ns = time.time_ns()
    return now_ns // 1000, min(times_ns, default=now_ns) // 1000


def _settled(result: Any) -> tuple[list[Place], int]:
    doubles, lost = result
    return [place_of(value) for value in doubles], int(lost)


def _detached(result: Any) -> list[Place] | None:
    return None if result is None else [place_of(value) for value in result]


def _numbers(result: Any) -> tuple[int, int, int]:
    pages, files, slots = result
    return int(pages), int(files), int(slots)


def _slots(result: Any) -> list[int]:
    return [int(slot) for slot in result]
