"""Edge cases have the sizes and properties that the checks rely on."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Callable

import pytest
import xxhash
from hicache_conformance.scenarios.edge_cases import (
    batch_sizes,
    deceptive_bytes,
    nearly_equal,
    segmentations,
    similar_hashes,
)
from hicache_conformance.tools.content.memory import PageMemory

FUNCTIONS_OF_32_BITS: dict[str, Callable[[bytes], object]] = {
    "SHA-256": lambda text: hashlib.sha256(text).digest()[:4],
    "xxHash32": xxhash.xxh32_intdigest,
    "xxh3-64, the last bits": lambda text: xxhash.xxh3_64_intdigest(text) & 0xFFFFFFFF,
    "CRC-32 of the bytes": lambda text: zlib.crc32(bytes.fromhex(text.decode())),
    "Adler-32": zlib.adler32,
}


def test_similar_hashes_are_different_page_hashes() -> None:
    for words, hashes in similar_hashes(random.Random(1)).items():
        assert len(set(hashes)) == len(hashes) > 1, words
        assert {len(one) % 2 for one in hashes} == {0}, words
        if words == "equal CRC-32":
            assert len({zlib.crc32(one.encode()) for one in hashes}) == 1
        assert all(32 <= len(one) <= 128 and set(one) <= set("0123456789abcdef") for one in hashes)


@pytest.mark.parametrize("name", FUNCTIONS_OF_32_BITS)
def test_some_similar_hashes_are_equal_in_32_bits(name: str) -> None:
    function = FUNCTIONS_OF_32_BITS[name]
    one, other = similar_hashes(random.Random(1))[f"equal in 32 bits of {name}"]

    assert function(one.encode()) == function(other.encode())


@pytest.mark.parametrize("nbytes", [1, 2, 3, 8, 600])
def test_edge_cases_have_the_size_that_is_asked_for(nbytes: int) -> None:
    noise = random.Random(3)
    deceptive = deceptive_bytes(nbytes, noise)
    nearly = nearly_equal(nbytes, noise)

    assert {nbytes} == {len(data) for data in (*deceptive.values(), *nearly)}
    assert len(set(nearly)) == len(nearly)


@pytest.mark.parametrize("checksum", [zlib.crc32, zlib.adler32])
def test_some_nearly_equal_pages_have_equal_checksums(checksum: Callable[[bytes], int]) -> None:
    pages = nearly_equal(600, random.Random(3))

    assert len({checksum(page) for page in pages}) < len(pages)


@pytest.mark.parametrize(("nbytes", "alignment"), [(1, 1), (4099, 1), (4099 * 512, 512), (100, 64)])
def test_segments_add_up_to_the_page_and_begin_aligned(nbytes: int, alignment: int) -> None:
    for words, lengths in segmentations(nbytes, alignment, random.Random(4)).items():
        assert nbytes == sum(lengths), words
        assert all(lengths), words
        assert not any(length % alignment for length in lengths[:-1]), words
        memory = PageMemory(2, nbytes, alignment=alignment, lengths=lengths)
        assert [len(lengths)] * 2 == [len(page.segments) for page in memory.pages]
        assert not memory.overrun()


def test_batches_go_up_to_the_limit() -> None:
    assert [1] == batch_sizes(1)
    assert [1, 2, 3, 5, 7] == batch_sizes(7)
    assert 1025 == batch_sizes(1025)[-1]
