"""What the adapters of all peers share: a store that was written for another interface than ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hicache_storage.errors import UnsupportedOperation
from hicache_storage.storage import HiCacheStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.keys import KeySpace

LISTS_NOTHING = {
    "spaces": "it lists no key spaces",
    "scan": "it lists no pages",
}
DELETES_NOTHING = {"batch_delete": "it deletes no single page"}
CLEARS_NOTHING = {"clear": "it removes no pages by key space"}
CHECKS_NO_CONFIG = {"from_config": "its engine checks its config, and here the adapter"}
HANDS_PAGES_OVER_BARE = {"page_store": "its engine puts no checksum around pages"}
CUTS_EQUALLY = {"open_space": "its engine cuts layers and heads into equal parts, this is none"}
ONE_VERDICT_A_SET = {"batch_set": "it gives one verdict for a batch, not one a page"}
"""Entries for `AdaptedStorage.absent`."""


class AdaptedStorage(HiCacheStorage):
    """A store of another engine. What its interface has not raises UnsupportedOperation.

    What it raises itself out of a call is passed on as it is: its engine would meet it as well.
    """

    distribution: ClassVar[str]
    """The peer's own, whose version the record tells."""
    absent: ClassVar[Mapping[str, str]]
    """What its interface has not: the `Subject.absent` of those who judge it."""

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:  # noqa: ARG002 - not done
        self.ensure_open()
        raise UnsupportedOperation(f"{type(self).__name__} deletes no single page")


def verdicts_of_prefixes(ask: Callable[[list[str]], int], keys: Sequence[str]) -> list[bool]:
    """Whether each page is there, from a store that only tells how many leading ones are.

    One call where all are present; after a miss each of the rest is asked for by itself.
    """
    wanted = list(keys)
    leading = ask(wanted) if wanted else 0
    rest = [ask([key]) == 1 for key in wanted[leading + 1 :]]
    return [*[True] * leading, *[False] * (leading < len(wanted)), *rest]


def verdicts_of_batch(stored: bool, count: int) -> list[bool]:  # noqa: FBT001 - the peer's own verdict
    """One verdict a page, from a store that gives one for a whole batch.

    Raises:
        UnsupportedOperation: It says that the batch failed, and not which of its pages did.
    """
    if stored or count <= 1:
        return [stored] * count
    raise UnsupportedOperation(
        f"the store refused a batch of {count} pages without saying which: set one page a call"
    )


def equal_part(part: tuple[int, int], total: int, what: str) -> tuple[int, int]:
    """Which part of how many equal ones `part` is, as ranks hold them: its number, and how many.

    Raises:
        UnsupportedOperation: It is none.
    """
    start, end = part
    width = end - start
    if total % width or start % width or end > total:
        raise UnsupportedOperation(
            f"{what} {start} to {end} of {total} are none of equal parts, as ranks hold them"
        )
    return start // width, total // width
