"""Fill a store with numbered pages, from several processes at once."""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from _our_stores import key_space

from hicache_storage.page import Page
from hicache_storage.registry import open_storage

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from _scale_places import Place

    from hicache_storage.storage import HiCacheStorage

FILL_BATCH = 512
_DIGEST_NBYTES = 32


@dataclass(slots=True, kw_only=True)
class Sample:
    """One measurement: a number of pages (or 1 for a whole operation), and the time of all together."""

    count: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Processor time of the clients, including all of their threads."""

    @contextmanager
    def timing(self) -> Generator[None, None, None]:
        """Add the time of a block."""
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        yield
        self.wall_s += time.perf_counter() - begun_s
        self.cpu_s += time.process_time() - begun_cpu_s

    def __add__(self, other: Sample) -> Sample:
        return Sample(
            count=self.count + other.count,
            wall_s=self.wall_s + other.wall_s,
            cpu_s=self.cpu_s + other.cpu_s,
        )


def page_hash(number: int) -> str:
    """Return the hash of the page with this number."""
    return hashlib.sha256(b"%d" % number).hexdigest()


class Batch:
    """Memory for a number of pages. The payload of a page is its hash, repeated."""

    def __init__(self, pages: int, page_nbytes: int) -> None:
        if page_nbytes % _DIGEST_NBYTES:
            raise ValueError(
                f"a page of {page_nbytes} bytes does not repeat {_DIGEST_NBYTES} bytes"
            )
        self._repeats = page_nbytes // _DIGEST_NBYTES
        self._memory = memoryview(bytearray(pages * page_nbytes))
        self._page_nbytes = page_nbytes
        starts = range(0, len(self._memory), page_nbytes)
        self.pages = [Page(self._memory[start : start + page_nbytes]) for start in starts]

    def write(self, hashes: Sequence[str]) -> list[Page]:
        """Fill one page for each hash. Return these pages."""
        whole = self._payloads(hashes)
        self._memory[: len(whole)] = whole
        return self.pages[: len(hashes)]

    def overwrite(self) -> None:
        """Overwrite all pages."""
        self._memory[:] = bytes(len(self._memory))

    def check(self, hashes: Sequence[str]) -> None:
        """Compare the pages with the payloads of these hashes.

        Raises:
            RuntimeError: A byte differs.
        """
        whole = self._payloads(hashes)
        if self._memory[: len(whole)].tobytes() != whole:
            raise RuntimeError("a page came back with other bytes")

    def _payloads(self, hashes: Sequence[str]) -> bytes:
        return b"".join(bytes.fromhex(one) * self._repeats for one in hashes)


def set_numbers(storage: HiCacheStorage, batch: Batch, numbers: range, page_nbytes: int) -> Sample:
    """Set the pages with these numbers, in batches. Return only the time of the calls.

    Raises:
        RuntimeError: A page was refused.
    """
    space = key_space(page_nbytes)
    sample = Sample(count=len(numbers))
    for start in range(0, len(numbers), len(batch.pages)):
        hashes = [page_hash(number) for number in numbers[start : start + len(batch.pages)]]
        pages = batch.write(hashes)
        with sample.timing():
            verdicts = storage.batch_set(space, hashes, pages)
        if not all(verdicts):
            raise RuntimeError(f"{verdicts.count(False)} pages were refused: {storage.stats()}")
    return sample


def fill(place: Place, pages: int, page_nbytes: int, processes: int) -> Sample:
    """Set the pages from 0 to `pages` through storages in any number of processes.

    The time is the time of the calls, summed over the processes.
    """
    step = -(-pages // processes)
    parts = [range(start, min(start + step, pages)) for start in range(0, pages, step)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(parts), mp_context=context) as pool:
        tasks = [
            pool.submit(_fill_part, place.backend, dict(place.config), part, page_nbytes)
            for part in parts
        ]
        return sum((task.result() for task in tasks), Sample())


def _fill_part(backend: str, config: Mapping[str, Any], part: range, page_nbytes: int) -> Sample:
    with open_storage(backend, config) as storage:
        storage.open_space(key_space(page_nbytes))
        return set_numbers(storage, Batch(FILL_BATCH, page_nbytes), part, page_nbytes)
