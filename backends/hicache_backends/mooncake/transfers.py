"""Move pages to and from the cluster: directly in registered memory, else through staging memory."""

from __future__ import annotations

import time
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from hicache_backends.mooncake.client import TransferOverdue, checked
from hicache_backends.mooncake.objects import not_stored
from hicache_storage.backend_support.copies import copy_pages
from hicache_storage.errors import StorageUnavailable
from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_backends.mooncake.client import Client
    from hicache_storage.backend_support.deadline import Deadline

T = TypeVar("T")
Move: TypeAlias = "Callable[[Any, Sequence[str], Sequence[Page]], list[int]]"

_FAILED = -800
_GIVEN_UP_S = 55.0
"""A transfer that failed after this time was given up by the native client, which waits for 60 s. It
then goes on, and moves bytes when the peer goes on. Any transfer that failed earlier has ended."""
_STAGED_NBYTES = 64 << 20
"""The most staging memory of one native call, unless a single page is larger."""


class Transfers:
    """The reads and writes of whole batches. Thread-safe.

    The native client may use memory that the caller registered until a call has ended, even if it
    ends late. Other memory is the caller's again at the deadline, and a late call could still write
    into it or read new contents from it. So such pages are copied through staging memory, which a
    late call keeps.
    """

    def __init__(self, client: Client, *, register_staging: bool) -> None:
        self._client = client
        self._register_staging = register_staging

    def read(self, keys: Sequence[str], pages: Sequence[Page], deadline: Deadline) -> list[bool]:
        """Fill the pages. Return True for each page that arrived with exactly its own length."""
        results = [False] * len(keys)
        firsts = _first_indices(keys)
        for indices, staged in self._parts(pages, sorted(set(firsts))):
            targets = staged or _select(pages, indices)
            codes = self._move(_get, _select(keys, indices), targets, deadline, staged=bool(staged))
            for index, target, code in zip(indices, targets, codes, strict=True):
                results[index] = code == target.nbytes
            if staged:
                found = [results[index] for index in indices]
                copy_pages(
                    list(compress(_select(pages, indices), found)), list(compress(staged, found))
                )
        for index, first in enumerate(firsts):
            if index != first and results[first]:
                copy_pages([pages[index]], [pages[first]])
                results[index] = True
        return results

    def write(
        self, keys: Sequence[str], pages: Sequence[Page], replicas: Any, deadline: Deadline
    ) -> list[bool]:
        """Store the pages under keys that are absent. Return True for each page that was stored."""
        put = _Put(replicas)
        results = [False] * len(keys)
        firsts = _first_indices(keys)
        for indices, staged in self._parts(pages, sorted(set(firsts))):
            if staged:
                copy_pages(staged, _select(pages, indices))
            sources = staged or _select(pages, indices)
            codes = self._move(put, _select(keys, indices), sources, deadline, staged=bool(staged))
            for index, code in zip(indices, codes, strict=True):
                results[index] = code == 0
        return [results[first] for first in firsts]

    def _move(
        self,
        move: Move,
        keys: Sequence[str],
        pages: Sequence[Page],
        deadline: Deadline,
        *,
        staged: bool,
    ) -> list[int]:
        start = pages[0].addresses[0][0] if staged and self._register_staging else None

        def task(native: Any) -> list[int]:
            if start is not None:
                native.register_buffer(start, sum(page.nbytes for page in pages))
            began_s = time.monotonic()
            try:
                codes = move(native, keys, pages)
                if _FAILED in codes and time.monotonic() - began_s >= _GIVEN_UP_S:
                    raise TransferOverdue
                return codes
            finally:
                if start is not None:
                    native.unregister_buffer(start)

        return self._client.call(task, deadline, borrowed=not staged)

    def _parts(
        self, pages: Sequence[Page], indices: Sequence[int]
    ) -> list[tuple[Sequence[int], list[Page]]]:
        """Return the page indices for each native call, with staging memory for unregistered pages."""
        outside = self._client.registered.outside(pages, indices)
        if not outside:
            return [(indices, [])]
        excluded = set(outside)
        direct = [index for index in indices if index not in excluded]
        parts: list[list[int]] = [[]]
        nbytes = 0
        for index in outside:
            if parts[-1] and nbytes + pages[index].nbytes > _STAGED_NBYTES:
                parts.append([])
                nbytes = 0
            parts[-1].append(index)
            nbytes += pages[index].nbytes
        staged = [(part, _staging([pages[index] for index in part])) for part in parts]
        return [(direct, []), *staged] if direct else [*staged]


def _get(native: Any, keys: Sequence[str], pages: Sequence[Page]) -> list[int]:
    if _have_one_segment(pages):
        return checked(native.batch_get_into(keys, *_ranges(pages)))
    return checked(native.batch_get_into_multi_buffers(keys, *_range_lists(pages)))


class _Put:
    """The puts of one call, which are repeated if the master fails."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas
        self._begun: set[str] = set()

    def __call__(self, native: Any, keys: Sequence[str], pages: Sequence[Page]) -> list[int]:
        is_repeated = not self._begun.isdisjoint(keys)
        self._begun.update(keys)
        if _have_one_segment(pages):
            codes = checked(native.batch_put_from(keys, *_ranges(pages), self._replicas))
        else:
            codes = checked(
                native.batch_put_from_multi_buffers(keys, *_range_lists(pages), self._replicas)
            )
        if is_repeated and not_stored(native, keys):
            raise StorageUnavailable(
                "mooncake: the master was lost in the middle of a set, so it is not known which"
                " pages are stored"
            )
        return codes


def _select(items: Sequence[T], indices: Sequence[int]) -> Sequence[T]:
    return items if len(indices) == len(items) else [items[index] for index in indices]


def _first_indices(keys: Sequence[str]) -> Sequence[int]:
    """Return for each key the index of its first occurrence.

    If several pages share a key, the native client fills only one of them.
    """
    if len(set(keys)) == len(keys):
        return range(len(keys))
    seen: dict[str, int] = {}
    return [seen.setdefault(key, index) for index, key in enumerate(keys)]


def _staging(pages: list[Page]) -> list[Page]:
    memory = np.empty(sum(page.nbytes for page in pages), np.uint8).data
    found: list[Page] = []
    start = 0
    for page in pages:
        found.append(Page(memory[start : start + page.nbytes]))
        start += page.nbytes
    return found


def _have_one_segment(pages: Sequence[Page]) -> bool:
    return all([len(page.segments) == 1 for page in pages])  # noqa: C419 - twice as fast as a generator


def _ranges(pages: Sequence[Page]) -> tuple[list[int], list[int]]:
    return [page.addresses[0][0] for page in pages], [page.nbytes for page in pages]


def _range_lists(pages: Sequence[Page]) -> tuple[list[list[int]], list[list[int]]]:
    addresses = [[address for address, _ in page.addresses] for page in pages]
    sizes = [[nbytes for _, nbytes in page.addresses] for page in pages]
    return addresses, sizes
