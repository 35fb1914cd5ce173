"""The paths of everything under a root directory, and the listing of page files.

usage                          the used bytes (`ledger`)
survey/turn                    the directory that a sweep looks at next (`eviction`)
                               survey/ has the time of the last count of all pages (`capacity`)
writers/TOKEN/                 the unpublished files of one live writer (`writer`)
spaces/ID/manifest.json        a description of key space ID, as JSON
spaces/ID/HH/HASH              one page (`page_file`); HH: the first two digits of its hash

`DirectoryTree` has the rules for files of other programs.
"""

from __future__ import annotations

import errno
import os
import re
from typing import TYPE_CHECKING, ClassVar

from hicache_storage import native
from hicache_storage.backend_support.directory_tree import DirectoryTree, TreeKind
from hicache_storage.backend_support.manifest import PAGE_HASH
from hicache_storage.errors import StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PAGES_A_LISTING = 4096
_ANY = re.compile(r".*", re.DOTALL)
_SHARD = re.compile(r"[0-9a-f]{2}")
SHARDS = [f"{number:02x}" for number in range(256)]
"""The names of the directories in a key space. Hashes spread the pages evenly over them."""


class Layout(DirectoryTree):
    """The paths under one root. Immutable."""

    __slots__ = ("counted", "usage")

    backend = "file"
    own_names = re.compile(r"usage|survey")
    kind = TreeKind(frozenset({"usage", "survey"}), _SHARD)
    others: ClassVar[Mapping[str, TreeKind]] = {
        "hf3fs": TreeKind(
            frozenset({"index.sqlite", "index.redis", "root-id", "lock"}),
            re.compile(r"slots-[0-9]{4,}"),
        )
    }

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.usage = f"{root}/usage"
        self.counted = f"{root}/survey"

    def pages(self, space_id: str) -> Iterator[list[str]]:
        """Yield the hashes of all files in a key space that are named like pages.

        The files may contain anything. Each list covers one whole directory, so that pages that are
        removed at the same time hide no other pages.

        Raises:
            StorageUnavailable: A directory cannot be listed, or the root is gone.
        """
        self.check_exists()
        for _, hashes in self._listed(self.space_dir(space_id), SHARDS):
            yield hashes

    def pages_in(self, shards: list[str]) -> Iterator[str]:
        """Yield the page files in these directories of every key space, with or without a manifest."""
        for space in self.space_entries():
            for directory, hashes in self._listed(space.path, shards, len(shards)):
                for page_hash in hashes:
                    yield f"{directory}/{page_hash}"

    def is_new(self) -> bool:
        """Return True while there is no key space, and therefore no page."""
        return not self.space_entries()

    def remove_shards(self, space_id: str) -> None:
        """Remove the empty directories of a key space.

        Raises:
            StorageUnavailable: A directory contains something of another program.
            OSError: The file system refuses a step.
        """
        for shard in self.directories(self.space_dir(space_id), _SHARD):
            try:
                os.rmdir(shard.path)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                for entry in self.entries(shard.path, _ANY):
                    is_page = PAGE_HASH.fullmatch(entry.name) and not entry.is_dir(
                        follow_symlinks=False
                    )
                    if not is_page or entry.is_symlink():
                        raise self.left(entry.path) from None

    def _listed(
        self, space: str, shards: list[str], count: int = 1
    ) -> Iterator[tuple[str, list[str]]]:
        """Yield the path of each directory of a key space, and the hashes in it.

        One call of the data plane lists several directories: `count` at first, and then as many as
        have a few thousand pages together.
        """
        if os.path.islink(space):
            return
        start = 0
        while start < len(shards):
            some = shards[start : start + count]
            paths = [f"{space}/{shard}" for shard in some]
            verdicts, names = native.list_directories([os.fsencode(path) for path in paths])
            for path, shard, verdict, hashes in zip(paths, some, verdicts, names, strict=True):
                if verdict < 0:
                    raise StorageUnavailable(
                        f"{self.backend}: {path} cannot be listed: {os.strerror(-verdict)}"
                    )
                if verdict == native.HIT:
                    yield path, [one for one in hashes if one[:2] == shard and not len(one) % 2]
            start += len(some)
            count = max(1, _PAGES_A_LISTING * len(some) // (sum(map(len, names)) + 1))
