"""The candidates of `controller.py`: each moves the same target and draft pages between L2 and L3."""

from __future__ import annotations

import abc
import ctypes
import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from hicache_backends.memory import MemoryStorage

from hicache_storage.controller import (
    CacheController,
    CachePool,
    ControllerSettings,
    PrefetchPolicy,
)
from hicache_storage.host_pool import HostPool, PageShape
from hicache_storage.keys import KeySpace, Shard
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings
from hicache_storage.page_store.frame import FRAME_NBYTES, FramedPage

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from hicache_storage.page_store.results import Outcome, Transfer

TIMEOUT_S = 600.0
PAGE_TOKENS = 64
LAYERS = {"kv": 32, "draft": 1}

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


class Workload:
    """What all candidates share: L2, a storage in memory, and pages with known bytes.

    L2 has twice as many slots as there are pages, and every slot is filled, so a save needs no
    fill.
    """

    def __init__(self, page_nbytes: int, pages: int) -> None:
        reuse_freed_memory()
        self.pages = pages
        self.page_nbytes = page_nbytes
        self.hashes = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(pages)]
        self.storage = MemoryStorage()
        self.pools = [_pool(name, page_nbytes, 2 * pages) for name in LAYERS]
        self._random = np.random.default_rng(page_nbytes)
        self.sources = [self._bytes(pages * pool.space.page_nbytes) for pool in self.pools]
        self.destinations = [np.ones_like(source) for source in self.sources]

    @property
    def request_nbytes(self) -> int:
        """The number of bytes in all pages of both pools."""
        return sum(len(source) for source in self.sources)

    def hosts(self) -> list[npt.NDArray[np.uint8]]:
        """Return L2's memory for one request as flat arrays: K and V of each pool."""
        tokens = self.pages * PAGE_TOKENS
        return [
            plane[:tokens].reshape(-1).view(np.uint8)
            for pool in self.pools
            for plane in pool.host.arrays()
        ]

    def fill_storage(self) -> None:
        """Store the source pages, with checksums."""
        slots = range(self.pages)
        for pool, source in zip(self.pools, self.sources, strict=True):
            rows = source.reshape(self.pages, -1)
            for slot in slots:
                pool.host.page(slot).copy_from(rows[slot])
        with PageStore(self.storage, PageStoreSettings(timeout_s=TIMEOUT_S)) as store:
            for pool in self.pools:
                store.open_space(pool.space)
            outcome = store.save(self.transfers([slots] * len(self.pools)))
        if not all(outcome.whole()):
            raise RuntimeError("the storage did not take all pages")

    def empty_storage(self) -> None:
        for space in list(self.storage.spaces()):
            self.storage.clear(space)

    def fill_hosts(self) -> None:
        """Fill every slot with new bytes."""
        for pool in self.pools:
            memory = np.frombuffer(pool.host.buffers[0], np.uint8)
            memory[:] = self._bytes(len(memory))

    def overwrite(self) -> None:
        """Overwrite every destination, so that only a transfer can restore its contents."""
        for pool in self.pools:
            for memory in pool.host.buffers:
                np.frombuffer(memory, np.uint8)[:] = 0xA5
        for destination in self.destinations:
            destination[:] = 0xA5

    def transfers(self, slots: Sequence[Sequence[int]]) -> list[Transfer]:
        """Return the transfers of all pages of all pools, using these slots."""
        return [
            transfer
            for pool, taken in zip(self.pools, slots, strict=True)
            for transfer in pool.transfers(self.hashes, taken)
        ]

    def check_hosts(self, slots: Sequence[Sequence[int]]) -> bool:
        """Return True if `slots` contain the source pages."""
        for pool, source, taken in zip(self.pools, self.sources, slots, strict=True):
            rows = source.reshape(self.pages, -1)
            if len(taken) != self.pages:
                return False
            if any(
                pool.host.page(slot).tobytes() != row.tobytes()
                for slot, row in zip(taken, rows, strict=True)
            ):
                return False
        return True

    def check_storage(self, slots: Sequence[Sequence[int]]) -> bool:
        """Return True if the storage has the contents of `slots`."""
        return all(
            self._stored(pool, page_hash) == pool.host.page(slot).tobytes()
            for pool, taken in zip(self.pools, slots, strict=True)
            for page_hash, slot in zip(self.hashes, taken, strict=True)
        )

    def _stored(self, pool: CachePool, page_hash: str) -> bytes:
        space = framed(pool.space)
        destination = bytearray(space.stored_nbytes)
        found = self.storage.batch_get(space, [page_hash], [Page(destination)])
        return bytes(destination[FRAME_NBYTES:]) if found == [True] else b""

    def _bytes(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(bytearray(self._random.bytes(nbytes)), np.uint8)


class TransferMethod(abc.ABC):
    """One way to move all pages of a request from L3 to L2 and back."""

    name: str

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.slots: list[list[int]] = [list(range(workload.pages)) for _ in workload.pools]

    @abc.abstractmethod
    def load(self) -> None:
        """Move the pages from L3 to L2, into `slots`. Timed."""

    @abc.abstractmethod
    def save(self) -> None:
        """Move the pages from L2 to L3, from `slots`. Timed."""

    def loaded(self) -> bool:
        """Return True if `load` moved everything."""
        return self.workload.check_hosts(self.slots)

    def saved(self) -> bool:
        """Return True if `save` stored everything."""
        return self.workload.check_storage(self.slots)

    def forget(self) -> None:  # noqa: B027 - most methods keep no page
        """Drop the pages in L2."""

    def close(self) -> None:  # noqa: B027 - most methods have no thread
        """Stop threads."""


class Memcpy(TransferMethod):
    """Plain copies of the same bytes: one copy per thread and plane."""

    def __init__(self, workload: Workload, threads: int) -> None:
        super().__init__(workload)
        self.name = f"memcpy, {threads} thread{'s' * (threads > 1)}"
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads)
        self._hosts = workload.hosts()
        self._sources = [half for source in workload.sources for half in np.split(source, 2)]
        self._destinations = [
            half for destination in workload.destinations for half in np.split(destination, 2)
        ]

    def load(self) -> None:
        self._copy(self._hosts, self._sources)

    def save(self) -> None:
        self._copy(self._destinations, self._hosts)

    def loaded(self) -> bool:
        return all(map(np.array_equal, self._hosts, self._sources))

    def saved(self) -> bool:
        return all(map(np.array_equal, self._destinations, self._hosts))

    def close(self) -> None:
        self._executor.shutdown()

    def _copy(self, targets: list[Any], sources: list[Any]) -> None:
        def part(number: int) -> None:
            for target, source in zip(targets, sources, strict=True):
                step = -(-len(source) // self._threads)
                cut = slice(number * step, (number + 1) * step)
                np.copyto(target[cut], source[cut])

        list(self._executor.map(part, range(self._threads)))


class Backend(TransferMethod):
    """The storage's two calls on one thread, with prepared pages."""

    name = "memory backend"

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._calls = [
            (framed(pool.space), [_stored(pool.host.tile_page(slot)) for slot in slots])
            for pool, slots in zip(workload.pools, self.slots, strict=True)
        ]

    def load(self) -> None:
        for space, pages in self._calls:
            self.workload.storage.batch_get(space, self.workload.hashes, pages)

    def save(self) -> None:
        for space, pages in self._calls:
            self.workload.storage.batch_set(space, self.workload.hashes, pages)


class Store(TransferMethod):
    """The page store, with prepared framed pages."""

    def __init__(self, workload: Workload, checksum: Literal["xxh3", "none"]) -> None:
        super().__init__(workload)
        self.name = f"page store, {checksum}"
        self.store = page_store(workload, checksum)
        for pool in workload.pools:
            self.store.open_space(pool.space)
        self._transfers = workload.transfers(self.slots)

    def load(self) -> None:
        _whole(self.store.load(self._transfers))

    def save(self) -> None:
        _whole(self.store.save(self._transfers))

    def close(self) -> None:
        self.store.close()


class Controller(TransferMethod):
    """An engine's calls: prefetch, wait, take the lease; reserve, commit, drain the write queue."""

    def __init__(self, workload: Workload, checksum: Literal["xxh3", "none"]) -> None:
        super().__init__(workload)
        self.name = f"controller, {checksum}"
        self._store = page_store(workload, checksum)
        settings = ControllerSettings(prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
        self.controller = CacheController(self._store, workload.pools, settings)
        self.controller.start()

    def load(self) -> None:
        with self.controller.prefetch("request", self.workload.hashes).result() as lease:
            self.slots = lease.slots

    def save(self) -> None:
        reservation = self.controller.reserve(self.workload.hashes)
        self.slots = reservation.slots
        self.controller.commit(reservation)
        self.controller.drain(TIMEOUT_S)

    def forget(self) -> None:
        self.controller.cache.clear()

    def close(self) -> None:
        self.controller.close()
        self._store.close()


def page_store(workload: Workload, checksum: Literal["xxh3", "none"]) -> PageStore:
    return PageStore(workload.storage, PageStoreSettings(checksum=checksum, timeout_s=TIMEOUT_S))


def _stored(payload: Page) -> Page:
    return FramedPage(memoryview(bytearray(FRAME_NBYTES)), payload).stored


def framed(space: KeySpace) -> KeySpace:
    """Return the key space that the page store opens for `space`."""
    return replace(space, frame_nbytes=FRAME_NBYTES)


def reuse_freed_memory() -> None:
    """Let malloc keep freed memory.

    The memory backend makes a new object for every page. With malloc's defaults each object would
    get fresh memory from the kernel, and page faults would dominate the measurement.
    """
    libc = ctypes.CDLL(None)
    for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 1 << 30), (_M_ARENA_MAX, 1)):
        if not libc.mallopt(option, value):
            raise RuntimeError(f"mallopt({option}, {value}) was refused: this needs glibc")


def _pool(name: str, page_nbytes: int, slots: int) -> CachePool:
    """Return a pool for target pages of `page_nbytes`. A draft has 1 layer, the target 32."""
    dim = page_nbytes // (LAYERS["kv"] * PAGE_TOKENS * 4)
    shape = PageShape.mha(
        page_tokens=PAGE_TOKENS, layers=LAYERS[name], heads=1, head_dim=dim, dtype="bfloat16"
    )
    space = KeySpace(
        model="benchmark",
        dtype=shape.dtype,
        layout="page_first",
        page_tokens=PAGE_TOKENS,
        page_nbytes=shape.nbytes,
        shard=Shard(layers=(0, shape.layers), heads=(0, 1)),
        pool=name,
    )
    return CachePool(space=space, host=HostPool(shape, slots=slots))


def _whole(outcome: Outcome) -> None:
    if not all(outcome.whole()):
        raise RuntimeError("the page store lost pages")
