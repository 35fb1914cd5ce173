"""A `Shelf` that moves pages between the caller's segments and their files without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.selftest.references.file_a_page import Shelf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from io import FileIO
    from pathlib import Path

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


class StreamingShelf(Shelf):
    """A store of files whose calls may take long for a page, which other calls never see in part.

    Its own methods: `_written` puts one page in place, `_landed` reads one, `_poured` writes its
    bytes into an open file.
    """

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._begin(space, hashes, pages)
        paths = [self._path(space, page_hash) for page_hash in hashes]
        return self._answer([self._landed(*pair) for pair in zip(paths, pages, strict=True)])

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._begin(space, hashes, pages)
        return self._answer(
            [
                page.nbytes == space.stored_nbytes
                and self._remember(space)
                and self._written(self._path(space, page_hash), page)
                for page_hash, page in zip(hashes, pages, strict=True)
            ]
        )

    def _landed(self, path: Path, page: Page) -> bool:
        try:
            with path.open("rb", buffering=0) as file:
                read = sum(file.readinto(segment) for segment in page.segments)
                return read == page.nbytes and not file.read(1)
        except OSError:
            return False

    def _written(self, path: Path, page: Page) -> bool:
        def pour(temp: Path) -> None:
            with temp.open("wb", buffering=0) as file:
                self._poured(page, file)

        return self._placed(path, pour)

    def _poured(self, page: Page, file: FileIO) -> None:
        for segment in page.segments:
            left = segment
            while left.nbytes:
                left = left[file.write(left) :]
