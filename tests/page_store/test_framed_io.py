"""Digests that a storage computed while it filled a page."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from framed import HASHES, TARGET, bytes_of, empty, filled
from hicache_backends.file import FileStorage

from hicache_storage.backend_support.revocable import AtomicRevocable
from hicache_storage.page_store.frame import FRAME_NBYTES, FramedPage
from hicache_storage.page_store.framed_io import FramedIO
from hicache_storage.page_store.results import Verdict
from hicache_storage.testing import Fault, FaultyStorage, Strike, WrapperStorage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.storage import HiCacheStorage
FRAMED = replace(TARGET, frame_nbytes=FRAME_NBYTES)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FileStorage]:
    with FileStorage.from_config({"path": str(tmp_path)}) as storage:
        storage.open_space(FRAMED)
        yield storage


def load(storage: HiCacheStorage) -> tuple[list[Verdict], bytes]:
    """Return the verdict on one page, and its bytes."""
    pages = empty(1)
    verdicts = FramedIO(storage, checksum=True).load(FRAMED, HASHES[:1], pages)
    return verdicts, pages[0].payload.tobytes()


def test_a_page_passes_by_the_digest_of_its_storage(files: FileStorage) -> None:
    FramedIO(files, checksum=True).save(FRAMED, HASHES[:1], filled(1))

    assert ([Verdict.OK], bytes_of(1)) == load(files)


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.TEAR])
def test_a_page_that_changed_after_its_digest_is_no_hit(files: FileStorage, fault: Fault) -> None:
    FramedIO(files, checksum=True).save(FRAMED, HASHES[:1], filled(1))
    faulty = FaultyStorage(files, [Strike("batch_get", 0, fault)])

    verdicts, _ = load(faulty)

    assert [Verdict.OK] != verdicts
    assert ([Verdict.OK], bytes_of(1)) == load(files)


class Revoking(WrapperStorage):
    """A revocable storage whose pages are revoked just after they were read."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        verdicts = super().batch_get(space, hashes, pages)
        for page in pages:
            if page.revocable is not None:
                page.revocable.revoke()
        return verdicts


def revocable_pages(pages: Sequence[FramedPage]) -> list[FramedPage]:
    for page in pages:
        page.payload.revocable = AtomicRevocable()
    return [FramedPage(page.header, page.payload) for page in pages]


def test_a_page_that_was_revoked_before_its_checksum_is_a_miss(files: FileStorage) -> None:
    FramedIO(files, checksum=True).save(FRAMED, HASHES[:3], filled(3))
    pages = revocable_pages(empty(3))

    verdicts = FramedIO(Revoking(files), checksum=True).load(FRAMED, HASHES[:3], pages)

    assert [Verdict.MISS] * 3 == verdicts
    assert [True] * 3 == files.batch_exists(FRAMED, HASHES[:3])


def test_a_page_that_was_revoked_before_its_seal_is_not_stored(files: FileStorage) -> None:
    pages = revocable_pages(filled(2))
    assert pages[0].payload.revocable is not None
    pages[0].payload.revocable.revoke()

    verdicts = FramedIO(files, checksum=True).save(FRAMED, HASHES[:2], pages)

    assert [Verdict.REFUSED, Verdict.OK] == verdicts
    assert [False, True] == files.batch_exists(FRAMED, HASHES[:2])
