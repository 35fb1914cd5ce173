"""Store completions as small pages, in their own key space of a page store."""

from __future__ import annotations

import logging
import time
from itertools import islice
from typing import TYPE_CHECKING

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import HiCacheError
from hicache_storage.handoff.completion import Completion
from hicache_storage.keys import KeySpace, Shard
from hicache_storage.page import Page
from hicache_storage.page_store.results import Transfer, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hicache_storage.page_store import PageStore

logger: logging.Logger = logging.getLogger(__name__)

POOL = "handoff"
PAGE_NBYTES = 4096

_SWEEP_BATCH = 256


class CompletionStore:
    """The completions of one model and tenant in a page store. Thread-safe.

    A method blocks as long as its calls of the page store.

    Completions are framed and checksummed like any page. A damaged one is deleted and counts as missing.
    """

    def __init__(self, store: PageStore, target: KeySpace, *, stale_after_s: float) -> None:
        """Open the key space.

        Args:
            store: The page store that both sides share. It need not be the store of the pages.
            target: Any key space of the target. It supplies the model, revision, tenant and page size.
            stale_after_s: The largest difference between now and the time of a fresh completion.

        Raises:
            StorageUnavailable, StorageTimeout, UnsupportedOperation: The key space could not be opened.
        """
        self._store = store
        self._stale_after_s = stale_after_s
        self.space: KeySpace = KeySpace(
            model=target.model,
            revision=target.revision,
            tenant=target.tenant,
            dtype="json",
            layout="completion-1",  # so that no version reads or sweeps another version's completions
            page_tokens=target.page_tokens,
            page_nbytes=PAGE_NBYTES,
            shard=Shard(layers=(0, 1)),
            pool=POOL,
        )
        store.open_space(self.space)

    def post(self, completions: Mapping[str, Completion]) -> list[str]:
        """Write `completions` under their keys. Return the keys that the store did not take.

        Completions of an earlier attempt are deleted first, because a store may keep the bytes that it
        already has. If that fails and the store does not overwrite pages, nothing is written.
        """
        keys, deadline = list(completions), self._deadline()
        deleted = self._store.delete(self.space, keys, timeout_s=deadline.remaining_s())
        if deleted < len(keys) and not self._store.storage.capabilities.overwrites:
            return keys
        pages = [Page(completion.encode(PAGE_NBYTES)) for completion in completions.values()]
        transfer = Transfer(self.space, keys, pages)
        (verdicts,) = self._store.save([transfer], timeout_s=deadline.remaining_s()).verdicts
        return [
            key for key, verdict in zip(keys, verdicts, strict=True) if verdict is not Verdict.OK
        ]

    def read(self, keys: Sequence[str]) -> dict[str, Completion]:
        """Return the fresh completions under `keys`. Delete stale and unreadable completions."""
        deadline = self._deadline()
        present = self._store.present(self.space, keys, timeout_s=deadline.remaining_s())
        wanted = [key for key, is_present in zip(keys, present, strict=True) if is_present]
        if not wanted:
            return {}
        pages = [Page(bytearray(PAGE_NBYTES)) for _ in wanted]
        transfer = Transfer(self.space, wanted, pages)
        (verdicts,) = self._store.load([transfer], timeout_s=deadline.remaining_s()).verdicts
        read = {
            key: Completion.decode(page.tobytes())
            for key, page, verdict in zip(wanted, pages, verdicts, strict=True)
            if verdict is Verdict.OK
        }
        fresh = {key: found for key, found in read.items() if found and self._is_fresh(found)}
        self.remove([key for key in read if key not in fresh])
        return fresh

    def remove(self, keys: Sequence[str]) -> None:
        """Delete the completions under `keys`, some of which may be deleted already."""
        self._store.delete(self.space, keys)

    def sweep(self) -> int:
        """Delete stale completions, which engines have left behind. Return the number of fresh ones.

        Return 0 if the storage cannot list pages. Its own eviction then limits the completions.
        """
        fresh = 0
        if not self._store.storage.capabilities.enumerable:
            return fresh
        keys = self._list_keys()
        try:
            while batch := list(islice(keys, _SWEEP_BATCH)):
                fresh += len(self.read(batch))
        except HiCacheError as error:
            logger.warning("stale completions could not be swept: %s", error)
        return fresh

    def _deadline(self) -> Deadline:
        """Return a new deadline for all store calls of one method."""
        return Deadline(self._store.settings.timeout_s)

    def _list_keys(self) -> Iterator[str]:
        framed = self._store.framed(self.space)
        return (info.page_hash for info in self._store.storage.scan(framed))

    def _is_fresh(self, completion: Completion) -> bool:
        return abs(time.time() - completion.written_at_s) <= self._stale_after_s
