"""Publishing of files by each kind of filesystem."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from fsspec_stores import SPACE, A, B, open_store, page_file
from hicache_backends.fsspec import FsspecStorage
from hicache_backends.fsspec.layout import TRAILER_NBYTES
from pages import blank, page

from hicache_storage.errors import StorageUnavailable


class TestPublishing:
    def test_nothing_but_pages_and_the_manifest_is_left(
        self, local: FsspecStorage, tmp_path: Path
    ) -> None:
        local.batch_set(SPACE, [A, B], [page(), page()])

        found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
        assert {f"kv/{SPACE.id}/{name}" for name in (A, B, "manifest.json")} == found

    def test_a_write_that_fails_leaves_nothing(self, local: FsspecStorage, tmp_path: Path) -> None:
        page_file(tmp_path, A).mkdir()
        (page_file(tmp_path, A) / "in the way").touch()
        with pytest.raises(StorageUnavailable):
            local.batch_set(SPACE, [A], [page()])

        assert list((tmp_path / "kv" / "writing").iterdir()) == []

    def test_files_of_writers_that_died_long_ago_go_when_it_is_opened(self, tmp_path: Path) -> None:
        """Files with other names belong to other programs, and stay however old they are."""
        open_store(f"file://{tmp_path}/kv").close()
        token, writing = "0123456789abcdef", tmp_path / "kv" / "writing"
        old, young = f"{token}-0", f"{token}-12"
        foreign = ["novel.txt", f"{token}-x", f"{token}-1.txt", f"{token[1:]}-1", f"{token}0-1"]
        two_days_ago_s = time.time() - 2 * 86_400
        for name in (old, young, *foreign):
            (writing / name).touch()
            if name != young:
                os.utime(writing / name, (two_days_ago_s, two_days_ago_s))
        open_store(f"file://{tmp_path}/kv").close()

        assert {young, *foreign} == {path.name for path in writing.iterdir()}

    def test_a_directory_that_has_vanished_is_made_again(
        self, local: FsspecStorage, tmp_path: Path
    ) -> None:
        """The directory gets its manifest back too, so that its pages can be listed."""
        (tmp_path / "kv" / SPACE.id / "manifest.json").unlink()
        (tmp_path / "kv" / SPACE.id).rmdir()

        assert local.batch_set(SPACE, [A], [page()]) == [True]
        assert list(local.spaces()) == [SPACE]

    def test_in_place_a_page_that_is_there_is_left_alone(self, tmp_path: Path) -> None:
        with open_store(f"file://{tmp_path}/kv", atomic="none") as store:
            store.batch_set(SPACE, [A], [page(seed=1)])
            store.batch_set(SPACE, [A], [page(seed=2)])
            store.batch_get(SPACE, [A], [found := blank()])

        assert page(seed=1).tobytes() == found.tobytes()

    def test_in_place_a_page_that_was_seen_to_be_wrong_goes(self, tmp_path: Path) -> None:
        with open_store(f"file://{tmp_path}/kv", atomic="none") as store:
            store.batch_set(SPACE, [A], [page(seed=1)])
            page_file(tmp_path, A).write_bytes(bytes(SPACE.stored_nbytes + TRAILER_NBYTES))

            assert store.batch_get(SPACE, [A], [blank()]) == [False]
            assert not page_file(tmp_path, A).exists()
            assert store.stats().counters == {"wrong_pages": 1}
