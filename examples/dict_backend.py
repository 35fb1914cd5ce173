"""A complete backend that you can copy for your own: it stores pages in a dict.

Run as a program, it stores the first of two pages, and looks both up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from hicache_storage import Capabilities, HiCacheStorage, KeySpace, Page, Retention
from hicache_storage.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class DictStorage(HiCacheStorage):
    capabilities = Capabilities(retention=Retention.UNTIL_DELETED)

    def __init__(self) -> None:
        self.pages: dict[tuple[KeySpace, str], bytes] = {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        Settings.parse(
            "dict", config
        )  # the config has no fields, so any field is an error
        return cls()

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        return [(space, page_hash) in self.pages for page_hash in hashes]

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        found = [self.pages.get((space, page_hash)) for page_hash in hashes]
        for data, page in zip(found, pages, strict=True):
            if data is not None:
                page.copy_from(data)
        return [data is not None for data in found]

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        for page_hash, page in zip(hashes, pages, strict=True):
            self.pages[space, page_hash] = page.tobytes()
        return [True] * len(hashes)

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        for page_hash in hashes:
            self.pages.pop((space, page_hash), None)
        return [True] * len(hashes)


if __name__ == "__main__":
    from hicache_storage import Shard, page_hashes

    space = KeySpace(
        model="meta-llama/Llama-3.1-8B-Instruct",
        dtype="bfloat16",
        layout="page_first",
        page_tokens=4,
        page_nbytes=1024,
        shard=Shard(layers=(0, 32), heads=(0, 8)),
    )
    hashes = page_hashes([101, 7592, 2088, 999, 2023, 2003, 1037, 3231], page_tokens=4)
    with DictStorage.from_config({}) as storage:
        storage.open_space(space)
        print("stored:", storage.batch_set(space, hashes[:1], [Page(bytes(1024))]))
        print("there:", storage.batch_exists(space, hashes))
