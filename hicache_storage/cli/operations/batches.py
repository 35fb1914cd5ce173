"""Batches of pages: their size, the memory that they are read into, and threads that process them."""

from __future__ import annotations

import mmap
import threading
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from hicache_storage.backend_support.shared_resource import CallGate
from hicache_storage.durations import MAX_DURATION_S
from hicache_storage.keys import KeySpace, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from hicache_storage.storage import HiCacheStorage, PageInfo

T = TypeVar("T")
R = TypeVar("R")

_MOST_PAGES = 64
_MOST_LISTED = 256
_MOST_NBYTES = 32 << 20
_MOST_THREADS = 16
_BATCHES_PER_THREAD = 2


def trial_space(model: str, pool: str, page_nbytes: int, page_tokens: int) -> KeySpace:
    """Return a key space for a verb's own pages, with a model that no engine uses."""
    return KeySpace(
        model=model,
        dtype="uint8",
        layout="page_first",
        page_tokens=page_tokens,
        page_nbytes=page_nbytes,
        shard=Shard(layers=(0, 1)),
        pool=pool,
    )


def pages_per_batch(space: KeySpace, *storages: HiCacheStorage) -> int:
    """Return how many pages one call may have: at most 32 MiB, and as many as every storage accepts."""
    nbytes = space.stored_nbytes
    most = max(1, min(_MOST_PAGES, _MOST_NBYTES // nbytes))
    return min(one.capabilities.fitting_pages(most, nbytes) for one in storages)


def threads_for(*storages: HiCacheStorage) -> int:
    """Return how many threads to use: as many as every storage serves in parallel, within a limit."""
    return min(_MOST_THREADS, *(one.capabilities.parallelism for one in storages))


def batches(items: Iterable[T], pages: int) -> Iterator[list[T]]:
    """Yield the items in lists of `pages`. The last list may be shorter."""
    rest = iter(items)
    while batch := list(islice(rest, pages)):
        yield batch


def listed(storage: HiCacheStorage, space: KeySpace) -> Iterator[list[PageInfo]]:
    """Yield a key space's pages as the store lists them, in lists that fit one call."""
    most = storage.capabilities.max_batch or _MOST_LISTED
    return batches(storage.scan(space), min(_MOST_LISTED, most))


class PageMemory:
    """Memory for the batches of one key space. Each thread reuses one buffer for every batch."""

    def __init__(self, space: KeySpace, pages: int, alignment: int) -> None:
        self._nbytes = space.stored_nbytes
        self._stride = -(-self._nbytes // alignment) * alignment
        self._pages = pages
        self._local = threading.local()

    def views(self, count: int) -> list[memoryview]:
        """Return memory for `count` pages of this thread. The next call returns the same memory.

        Raises:
            MemoryError: The machine does not have it.
        """
        buffer: mmap.mmap | None = getattr(self._local, "buffer", None)
        if buffer is None:
            # A mapping begins at a page boundary, which is aligned enough for every store.
            try:
                buffer = self._local.buffer = mmap.mmap(-1, self._stride * self._pages)
            except (OSError, OverflowError) as error:
                raise MemoryError(str(error)) from None
        whole = memoryview(buffer)
        starts = (number * self._stride for number in range(count))
        return [whole[start : start + self._nbytes] for start in starts]

    def replace(self) -> None:
        """Give this thread new memory from now on. Views of the old memory stay valid."""
        self._local.buffer = None


def run_batches(
    work: Callable[[list[T]], R],
    items: Iterable[list[T]],
    threads: int,
    *,
    stop: Callable[[], None] | None = None,
) -> Generator[R, None, None]:
    """Yield the result of `work` for each batch, in the order in which they end.

    Only a few batches wait at any time. If a batch fails, the batches under way end, and no other
    begins. The same happens if the caller stops or is interrupted. Then `stop` is called, to end
    waits in `work`.
    """
    # If Ctrl-C is pressed while the pool starts a thread, the pool does not wait for that thread, but
    # the gate does.
    gate = CallGate()

    def unless_ended(batch: list[T]) -> R:
        if not gate.begin():
            raise CancelledError
        try:
            return work(batch)
        finally:
            gate.end()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="hicache-verb")
    pending: set[Future[R]] = set()
    try:
        left = iter(items)
        while True:
            for batch in islice(left, max(0, threads * _BATCHES_PER_THREAD - len(pending))):
                pending.add(pool.submit(unless_ended, batch))
            if not pending:
                break
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except BaseException:
        if stop is not None:
            stop()
        raise
    finally:
        gate.close()
        pool.shutdown(cancel_futures=True)
        gate.wait_until_idle(MAX_DURATION_S)
