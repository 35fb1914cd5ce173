"""Measure, for `scale.py`, what operations cost in a store that contains a number of pages."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from _our_stores import key_space
from _scale_fill import FILL_BATCH, Batch, Sample, fill, page_hash, set_numbers

if TYPE_CHECKING:
    from collections.abc import Generator

    from _scale_places import Place

_FIRST_NEW = 1 << 40
_FIRST_ABSENT = 1 << 41
_IN_PROCESS = 4096
"""One process sets up to this many pages; several processes set more pages."""


class FilledStore:
    """A store that contains the pages from 0 to `pages`. Every operation proves that it was done."""

    def __init__(
        self, place: Place, pages: int, *, page_nbytes: int, batch: int, processes: int
    ) -> None:
        self.pages = pages
        self._place = place
        self._page_nbytes = page_nbytes
        self._processes = processes
        self._space = key_space(page_nbytes)
        self._batch = Batch(max(batch, FILL_BATCH), page_nbytes)
        self._batch_pages = batch
        self._set_batch = Batch(batch, page_nbytes)
        self._random = random.Random(pages)
        self._new = range(_FIRST_NEW, _FIRST_NEW)
        """The numbers of the pages that `set` has added."""
        self.storage = place.open()
        self.storage.open_space(self._space)
        empty_nbytes = self._used_nbytes()
        self.filled = self._fill()
        self.nbytes_a_page = (self._used_nbytes() - empty_nbytes) / pages

    def exists_hit(self) -> Sample:
        """Look up a batch of pages that are stored."""
        return self._exists(self._present(), expected=True)

    def exists_miss(self) -> Sample:
        """Look up a batch of pages that are not stored."""
        first = _FIRST_ABSENT + self._random.randrange(_FIRST_ABSENT)
        hashes = [page_hash(first + number) for number in range(self._batch_pages)]
        return self._exists(hashes, expected=False)

    def get(self) -> Sample:
        """Read a batch of stored pages, chosen at random."""
        hashes = self._present()
        pages = self._batch.pages[: len(hashes)]
        self._batch.overwrite()
        sample = Sample(count=len(hashes))
        with sample.timing():
            verdicts = self.storage.batch_get(self._space, hashes, pages)
        _expect(all(verdicts), "a page was lost")
        self._batch.check(hashes)
        return sample

    def set(self, pages: int | None = None) -> Sample:
        """Set new pages: one batch, or the given number. `forget_new` removes them."""
        numbers = range(self._new.stop, self._new.stop + (pages or self._batch_pages))
        self._new = range(self._new.start, numbers.stop)
        return set_numbers(self.storage, self._set_batch, numbers, self._page_nbytes)

    def evict(self, turns: int) -> Sample:
        """Set new pages: enough that `turns` calls sweep a store at its capacity several times."""
        share = int(self._place.evictions_a_page * self.pages / turns)
        return self.set(max(4 * self._batch_pages, share))

    def forget_new(self) -> None:
        """Remove the pages that `set` has added."""
        for start in range(self._new.start, self._new.stop, FILL_BATCH):
            part = range(start, min(start + FILL_BATCH, self._new.stop))
            hashes = [page_hash(number) for number in part]
            _expect(all(self.storage.batch_delete(self._space, hashes)), "a page was not deleted")
        self._new = range(self._new.stop, self._new.stop)

    def scan(self) -> Sample:
        """List all pages."""
        sample = Sample(count=self.pages)
        with sample.timing():
            found = sum(1 for _ in self.storage.scan(self._space))
        _expect(found == self.pages, f"{found} of {self.pages} pages were listed")
        return sample

    def open(self) -> Sample:
        """Open another storage and its key space here, and look up a page."""
        hashes, sample = [page_hash(0)], Sample(count=1)
        with sample.timing():
            storage = self._place.open()
            storage.open_space(self._space)
            found = storage.batch_exists(self._space, hashes)
        storage.close()
        _expect(all(found), "a page was lost")
        return sample

    def count(self) -> Sample:
        """Measure how long a new storage takes until it has looked at every page and accepts one."""
        assert self._place.forget_counts is not None
        fields = self._place.ample_capacity(self._stored_nbytes())
        self.storage.close()
        self._place.forget_counts()
        sample = Sample(count=self.pages)
        with sample.timing():
            self.storage = self._place.open(**fields)
            self.storage.open_space(self._space)
            self.set(1)
        self.forget_new()
        self._reopen()
        return sample

    @contextmanager
    def at_capacity(self) -> Generator[None, None, None]:
        """Leave the store no space beyond its pages, so that every `set` evicts."""
        assert self._place.fill_capacity is not None
        assert self._place.evicted is not None
        self._reopen()  # another process may have set pages that this storage has not counted
        self._reopen(**self._place.fill_capacity(self._stored_nbytes()))
        before, first = self._place.evicted(self.storage), self._new.stop
        yield
        evicted, added = self._place.evicted(self.storage) - before, self._new.stop - first
        _expect(evicted >= added / 2, f"{added} pages were set, and {evicted} were evicted")

    def clear(self) -> Sample:
        """Remove all pages. Pages that were evicted earlier are missing from the sample's count."""
        sample = Sample()
        with sample.timing():
            sample.count = self.storage.clear(self._space)
        _expect(not any(self.storage.scan(self._space)), "pages are left")
        return sample

    def refill(self) -> None:
        """Set all pages again."""
        self._fill()

    def close(self) -> None:
        """Close the storage."""
        self.storage.close()

    # --- parts -----------------------------------------------------------------------------------

    def _fill(self) -> Sample:
        if self.pages <= _IN_PROCESS or not self.storage.capabilities.shared:
            return set_numbers(self.storage, self._batch, range(self.pages), self._page_nbytes)
        return fill(self._place, self.pages, self._page_nbytes, self._processes)

    def _present(self) -> list[str]:
        count = min(self._batch_pages, self.pages)
        return [page_hash(number) for number in self._random.sample(range(self.pages), count)]

    def _exists(self, hashes: list[str], *, expected: bool) -> Sample:
        sample = Sample(count=len(hashes))
        with sample.timing():
            found = self.storage.batch_exists(self._space, hashes)
        _expect(found == [expected] * len(hashes), f"exists did not answer {expected}")
        return sample

    def _reopen(self, **fields: Any) -> None:
        self.storage.close()
        self.storage = self._place.open(**fields)
        self.storage.open_space(self._space)

    def _stored_nbytes(self) -> int:
        """Return the bytes of all pages, as the storage counts them."""
        return self.storage.stats().nbytes or 0

    def _used_nbytes(self) -> int:
        return self._place.nbytes() if self._place.nbytes else 0


def _expect(is_true: bool, otherwise: str) -> None:  # noqa: FBT001 - a condition
    if not is_true:
        raise RuntimeError(otherwise)
