"""The names of everything under a root directory, and the listing of the page files.

usage                          the used bytes (`ledger`)
survey/                        the oldest pages, for all processes (`victims_file`)
writers/TOKEN/                 the unpublished files of one live writer (`writer`)
spaces/ID/manifest.json        the key space ID, as JSON
spaces/ID/HH/HASH              one page (`page_file`); HH: the first two digits of its hash

`DirectoryTree` has the rules for files of other programs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hicache_storage.backend_support.directory_tree import DirectoryTree

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

_SHARD_NAME = re.compile(r"[0-9a-f]{2}")
_PAGE_NAME = re.compile(r"(?:[0-9a-f]{2}){16,64}")
SHARDS = [f"{number:02x}" for number in range(256)]
"""The names of the directories of a key space. Hashes spread pages evenly over them."""


class Layout(DirectoryTree):
    """The paths under one root. Immutable."""

    __slots__ = ("scans", "usage")

    backend = "file"

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.usage = f"{root}/usage"
        self.scans = f"{root}/survey"

    def pages(self, space_id: str) -> Iterator[list[os.DirEntry[str]]]:
        """Yield the files of a key space that have the name of a page, whatever is inside.

        Each list holds one whole directory, so that pages removed meanwhile hide no others.

        Raises:
            StorageUnavailable: A directory cannot be listed, or the root is gone.
        """
        self.check_exists()
        yield from self._pages_of(self.directories(self.space_dir(space_id), _SHARD_NAME))

    def all_pages(self) -> Iterator[os.DirEntry[str]]:
        """Yield the page files of all key spaces, with or without a manifest."""
        yield from self._pages_in(_SHARD_NAME)

    def pages_in(self, shard: str) -> Iterator[os.DirEntry[str]]:
        """Yield the page files in one directory of every key space: a fair sample of all pages."""
        yield from self._pages_in(re.compile(shard))

    def is_new(self) -> bool:
        """Return True while there is no key space, and therefore no page."""
        return not self.space_entries()

    def _pages_in(self, shard: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
        for directory in self.space_entries():
            for pages in self._pages_of(self.directories(directory.path, shard)):
                yield from pages

    def _pages_of(self, shards: list[os.DirEntry[str]]) -> Iterator[list[os.DirEntry[str]]]:
        for shard in shards:
            yield [
                entry
                for entry in self.entries(shard.path, _PAGE_NAME)
                if entry.name.startswith(shard.name) and entry.is_file(follow_symlinks=False)
            ]
