"""Delete wrong pages after a load, so that the next save stores correct ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.page_store.counters import WRONG_PAGES_DELETED
from hicache_storage.page_store.results import Verdict
from hicache_storage.page_store.storage_calls import logger
from hicache_storage.scalars import counted

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store.begun import Waiting
    from hicache_storage.page_store.results import Outcome
    from hicache_storage.page_store.storage_calls import FramedTransfer, Lanes

_WRONG = frozenset({Verdict.CORRUPT, Verdict.WRONG_KEY, Verdict.WRONG_SIZE})


def delete_wrong_pages(
    lanes: Lanes, transfers: Sequence[FramedTransfer], outcome: Outcome, deadline: Deadline
) -> Generator[Waiting]:
    """Delete wrong pages, because a store that does not overwrite pages would keep them forever."""
    wrong: dict[KeySpace, list[str]] = {}
    for (framed, transfer), verdicts in zip(transfers, outcome.verdicts, strict=True):
        found = [
            page_hash
            for page_hash, verdict in zip(transfer.hashes, verdicts, strict=True)
            if verdict in _WRONG
        ]
        if found:
            wrong.setdefault(framed, []).extend(found)
    if not wrong:
        return
    left_s = deadline.remaining_s()
    # A new deadline, so that time which the reads took does not count as a failure of the writes.
    gone = (yield from lanes.writes.delete(wrong, Deadline(left_s))) if left_s else []
    deleted = len(gone)
    lanes.counters.add(WRONG_PAGES_DELETED, deleted)
    left = sum(map(len, wrong.values())) - deleted
    if left:
        logger.warning("%s could not be deleted", counted(left, "wrong page"))
