"""Digests that a storage computed while it filled a page."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from framed import HASHES, TARGET, bytes_of, empty, filled
from hicache_backends.file import FileStorage

from hicache_storage.page_store.frame import FRAME_NBYTES
from hicache_storage.page_store.framed_io import FramedIO
from hicache_storage.page_store.results import Verdict
from hicache_storage.testing import Fault, FaultyStorage, Strike

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
