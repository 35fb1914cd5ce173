"""This project's stores: any backend, called directly or under the page store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from _store import Memory, Store

from hicache_storage.keys import KeySpace, Shard
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings
from hicache_storage.page_store.results import Transfer, Verdict
from hicache_storage.registry import open_storage

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hicache_storage.storage import HiCacheStorage

PAGE_TOKENS = 64
TIMEOUT_S = 600.0


class OurStorage(Store):
    """A backend, called directly on this thread. A page may have its header in a segment of its own."""

    def __init__(
        self,
        storage: HiCacheStorage,
        source: Memory,
        destination: Memory,
        *,
        name: str = "",
        detail: str = "",
        header_nbytes: int = 0,
    ) -> None:
        super().__init__(source, destination)
        self._of = type(storage).__name__
        self.name = name or f"ours: {self._of}{detail}"
        self._storage = storage
        self._space = key_space(source.page_nbytes)
        self._storage.open_space(self._space)
        self._sources, self._targets = (
            [Page(view[:header_nbytes], view[header_nbytes:]) for view in memory.views]
            for memory in (source, destination)
        )

    def prepare_set(self, hashes: Sequence[str]) -> None:
        super().prepare_set(hashes)
        self._storage.open_space(self._space)  # an emptied store has lost its manifest

    def set_part(self, hashes: Sequence[str], part: slice) -> None:
        if not all(self._storage.batch_set(self._space, hashes, self._sources[part])):
            raise RuntimeError(f"{self._of} refused a page: {self._storage.stats()}")

    def get_part(self, hashes: Sequence[str], part: slice) -> None:
        if not all(self._storage.batch_get(self._space, hashes, self._targets[part])):
            raise RuntimeError(f"{self._of} lost a page: {self._storage.stats()}")

    def close(self) -> None:
        self._storage.close()


class OurPageStore(Store):
    """The page store over a backend, with frames, verdicts and the default number of threads."""

    def __init__(
        self,
        storage: HiCacheStorage,
        source: Memory,
        destination: Memory,
        *,
        checksum: Literal["xxh3", "none"] = "xxh3",
        detail: str = "",
        parallelism: int | None = None,
    ) -> None:
        super().__init__(source, destination)
        self.name = f"ours: page store, {checksum}{detail}"
        self._storage = storage
        chosen = PageStoreSettings(checksum=checksum, timeout_s=TIMEOUT_S, parallelism=parallelism)
        self._store = PageStore(self._storage, chosen)
        self._space = key_space(source.page_nbytes)
        self._store.open_space(self._space)
        self._sources = [Page(view) for view in source.views]
        self._targets = [Page(view) for view in destination.views]

    def prepare_set(self, hashes: Sequence[str]) -> None:
        super().prepare_set(hashes)
        self._store.open_space(self._space)

    def set_part(self, hashes: Sequence[str], part: slice) -> None:
        outcome = self._store.save([Transfer(self._space, hashes, self._sources[part])])
        _expect_ok(outcome.verdicts[0])

    def get_part(self, hashes: Sequence[str], part: slice) -> None:
        outcome = self._store.load([Transfer(self._space, hashes, self._targets[part])])
        _expect_ok(outcome.verdicts[0])

    def close(self) -> None:
        self._store.close()
        self._storage.close()


def in_directory(
    backend: str,
    directory: Path,
    source: Memory,
    destination: Memory,
    *,
    checksum: Literal["xxh3", "none"] | None = None,
    detail: str = "",
    parallelism: int | None = None,
    **settings: Any,
) -> Store:
    """Return a backend that stores pages in a directory.

    With `checksum`, it is under the page store.
    """
    config = {"path": str(directory), "timeout_s": TIMEOUT_S, **settings}
    storage = open_storage(backend, config)
    if checksum is None:
        return OurStorage(storage, source, destination, detail=detail)
    return OurPageStore(
        storage, source, destination, checksum=checksum, detail=detail, parallelism=parallelism
    )


def key_space(page_nbytes: int) -> KeySpace:
    """Return the key space of an MHA model with pages of this size."""
    return KeySpace(
        model="benchmarks/model",
        dtype="bfloat16",
        layout="page_first",
        page_tokens=PAGE_TOKENS,
        page_nbytes=page_nbytes,
        shard=Shard(layers=(0, 32), heads=(0, 8)),
    )


def _expect_ok(verdicts: Sequence[Verdict]) -> None:
    if verdicts.count(Verdict.OK) == len(verdicts):
        return
    for number, verdict in enumerate(verdicts):
        if verdict is not Verdict.OK:
            raise RuntimeError(f"the page store returned {verdict.value} of page {number}")
