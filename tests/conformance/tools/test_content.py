from __future__ import annotations

import threading
import time
import zlib

import pytest
from hicache_conformance.tools.content.content import PageRegistry, content
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import hash_of, space

SPACE, OTHER_SPACE = space().id, space(pool="draft").id
PAGE = hash_of(1)


@settings(deadline=None)  # The machine may be busy.
@given(nbytes=st.integers(0, 5000), more=st.integers(0, 5000), version=st.integers(0, 2**32 - 1))
def test_a_page_is_the_start_of_a_longer_one(nbytes: int, more: int, version: int) -> None:
    page = content(SPACE, PAGE, nbytes, version)

    assert nbytes == len(page)
    assert content(SPACE, PAGE, nbytes + more, version)[:nbytes] == page


def test_pages_are_the_same_in_every_process() -> None:
    assert "6230a173" == f"{zlib.crc32(content('5a' * 16, '0123456789abcdef' * 4, 100_000, 7)):08x}"


@pytest.mark.parametrize("nbytes", [1, 2, 8, 31])
def test_short_pages_of_other_hashes_spaces_and_versions_mostly_differ(nbytes: int) -> None:
    pages = [content(SPACE, hash_of(number), nbytes) for number in range(100)]
    spaces = [content(space(tenant=str(number)).id, PAGE, nbytes) for number in range(100)]
    versions = [content(SPACE, PAGE, nbytes, number) for number in range(100)]

    assert all(len(set(each)) >= 70 for each in (pages, spaces, versions))


def test_every_cell_of_a_page_is_unlike_every_other() -> None:
    pages = [content(SPACE, PAGE, 65536), content(SPACE, PAGE, 65536, 1)]
    pages.append(content(OTHER_SPACE, PAGE, 65536))

    cells = {page[start : start + 32] for page in pages for start in range(0, 65536, 32)}

    assert 3 * 65536 // 32 == len(cells)


def test_no_byte_is_the_same_in_all_cells() -> None:
    page = content(SPACE, PAGE, 32 * 4096)

    assert all(250 <= len(set(page[offset::32])) for offset in range(32))


def test_pages_do_not_compress() -> None:
    pages = b"".join(content(SPACE, hash_of(number), 65536) for number in range(4))

    assert len(zlib.compress(pages)) >= len(pages)


def test_a_page_of_64_mib_takes_less_than_a_second_of_cpu() -> None:
    started_s = time.process_time()
    content(SPACE, PAGE, 64 << 20)

    assert time.process_time() - started_s < 1


def test_a_ledger_holds_only_the_recorded_content() -> None:
    registry = PageRegistry()
    registry.add(SPACE, PAGE, 2)

    assert (SPACE, PAGE, 2) in registry
    assert (SPACE, PAGE, 1) not in registry
    assert (OTHER_SPACE, PAGE, 2) not in registry


def test_content_made_through_a_ledger_is_recorded() -> None:
    registry = PageRegistry()

    assert content(SPACE, PAGE, 100, 5) == registry.content(SPACE, PAGE, 100, 5)
    assert (SPACE, PAGE, 5) in registry


def test_a_ledger_may_be_written_and_read_by_several_threads() -> None:
    registry = PageRegistry()
    wrong = content(SPACE, PAGE, 4096, 1)

    def use(worker: int) -> None:
        for number in range(50):
            registry.add(SPACE, hash_of(1000 * worker + number))
            registry.diagnose(wrong, expected=[(SPACE, PAGE, 0)])

    threads = [threading.Thread(target=use, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert 200 == len(registry)
