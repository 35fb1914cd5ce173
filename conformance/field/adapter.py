"""The base of all adapters, which wrap stores with an interface that is not ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hicache_storage.errors import UnsupportedOperation
from hicache_storage.storage import HiCacheStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.keys import KeySpace

NO_LISTING = {
    "spaces": "it lists no key spaces",
    "scan": "it lists no pages",
}
NO_DELETE = {"batch_delete": "it deletes no single page"}
NO_CLEAR = {"clear": "it removes no pages by key space"}
NO_CONFIG_CHECK = {"from_config": "its engine checks its config, and here the adapter"}
NO_READ_ONLY = {"open_read_only": "its engine opens it to read and write only"}
NO_CHECKSUM = {"page_store": "its engine puts no checksum around pages"}
EQUAL_PARTS_ONLY = {"open_space": "its engine cuts layers and heads into equal parts, this is none"}
ONE_RESULT_A_BATCH = {"batch_set": "it gives one verdict for a batch, not one a page"}
"""Entries for `AdaptedStorage.absent`."""


class AdaptedStorage(HiCacheStorage):
    """A store of another engine. An operation that its interface lacks raises UnsupportedOperation.

    The adapter passes on the store's exceptions unchanged, because the engine would meet them too.
    """

    distribution: ClassVar[str]
    """The store's own distribution, whose version the record shows."""
    absent: ClassVar[Mapping[str, str]]
    """The operations that the interface lacks, each with the reason: `Subject.absent` of its tests."""

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:  # noqa: ARG002 - not done
        self.ensure_open()
        raise UnsupportedOperation(f"{type(self).__name__} deletes no single page")


def results_from_prefix_counts(ask: Callable[[list[str]], int], keys: Sequence[str]) -> list[bool]:
    """Return whether each page exists, for a store that only counts the leading pages that exist.

    One call is enough if all pages exist. After a miss, each further page takes a call of its own.
    """
    wanted = list(keys)
    leading = ask(wanted) if wanted else 0
    rest = [ask([key]) == 1 for key in wanted[leading + 1 :]]
    return [*[True] * leading, *[False] * (leading < len(wanted)), *rest]


def results_from_batch_flag(stored: bool, count: int) -> list[bool]:  # noqa: FBT001 - the peer's own verdict
    """Return one result per page, for a store that returns a single result for a whole batch.

    Raises:
        UnsupportedOperation: The store refused the batch without reporting which pages it refused.
    """
    if stored or count <= 1:
        return [stored] * count
    raise UnsupportedOperation(
        f"the store refused a batch of {count} pages without saying which: set one page a call"
    )


def equal_part(part: tuple[int, int], total: int, what: str) -> tuple[int, int]:
    """Return which of the equal parts of `total` this part is, as for ranks, and how many there are.

    Raises:
        UnsupportedOperation: No cut into equal parts has `part` as one of them.
    """
    start, end = part
    width = end - start
    if total % width or start % width or end > total:
        raise UnsupportedOperation(
            f"{what} {start} to {end} of {total} are not one of equal parts, as ranks hold them"
        )
    return start // width, total // width
