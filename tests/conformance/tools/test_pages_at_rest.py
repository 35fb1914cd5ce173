"""The tool that finds pages in the files of a store, and damages them there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hicache_conformance.case.case import Case
from hicache_conformance.run.outcomes import NotVerified
from hicache_conformance.run.subject import Scratch, Subject
from hicache_conformance.selftest.references.streaming import StreamingShelf
from hicache_conformance.tools.content.content import content
from hicache_conformance.tools.observation.pages_at_rest import InSharedFiles, OwnObject, at_rest


class Files(Subject):
    """A store of files without back doors."""

    storage_class = StreamingShelf

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        return {"path": str(scratch.path / "store")}


class TestPagesAtRest:
    SPACE_ID, HASHES = "ab" * 16, ["01" * 32, "02" * 32]

    def pages(self, nbytes: int = 9000) -> dict[str, bytes]:
        return {one: content(self.SPACE_ID, one, nbytes) for one in self.HASHES}

    def found(self, root: Path, pages: Mapping[str, bytes]) -> Any:
        with Case(Files()) as case:
            return at_rest(Files(), root, case.space(), pages, self.HASHES[0])

    def test_a_file_of_one_page_is_its_own(self, tmp_path: Path) -> None:
        pages = self.pages()
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "page").write_bytes(b"header" + pages[self.HASHES[0]] + b"trailer")

        found = self.found(tmp_path, pages)

        assert isinstance(found, OwnObject)
        assert [*range(6), *range(9006, 9013)] == found.overhead_offsets()

    def test_a_small_page_beside_another_one_is_not_alone(self, tmp_path: Path) -> None:
        pages = self.pages(500)
        (tmp_path / "both").write_bytes(b"".join(pages.values()))

        assert isinstance(self.found(tmp_path, pages), InSharedFiles)

    def test_a_page_in_pieces_is_found_and_flipped(self, tmp_path: Path) -> None:
        pages = self.pages()
        data = pages[self.HASHES[0]]
        path = tmp_path / "database"
        path.write_bytes(b"x" * 100 + data[:4000] + b"next" + data[4000:] + pages[self.HASHES[1]])

        found = self.found(tmp_path, pages)
        found.flip(5000, 3)

        assert isinstance(found, InSharedFiles)
        raw = path.read_bytes()
        assert data[5000] ^ 8 == raw[100 + 4 + 5000]

    def test_a_page_that_lies_in_no_file_needs_a_back_door(self, tmp_path: Path) -> None:
        (tmp_path / "zeros").write_bytes(bytes(20_000))

        with pytest.raises(NotVerified, match="tamper"):
            self.found(tmp_path, self.pages())

    def test_padding_identifies_no_page(self, tmp_path: Path) -> None:
        data = {one: bytes(4096) + page for one, page in self.pages().items()}
        for name, page in data.items():
            (tmp_path / name).write_bytes(page)

        assert isinstance(self.found(tmp_path, data), OwnObject)

    @pytest.mark.parametrize("changed", [b"", b"longer" * 3000, None])
    def test_an_object_is_replaced_and_never_changed_in_place(
        self, tmp_path: Path, changed: bytes | None
    ) -> None:
        """A process that maps the old file would be killed by SIGBUS."""
        pages = self.pages()
        (tmp_path / "a").mkdir()
        path = tmp_path / "a" / "page"
        path.write_bytes(pages[self.HASHES[0]])
        found = self.found(tmp_path, pages)
        with path.open("rb") as before:
            found.write(changed)

            assert pages[self.HASHES[0]] == before.read()

        assert changed == (path.read_bytes() if path.exists() else None)
