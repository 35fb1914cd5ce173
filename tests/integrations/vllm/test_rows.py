"""vLLM's rows as pages, and its keys as page hashes."""

from __future__ import annotations

import numpy as np
import pytest
from pages import space

from hicache_storage.integrations.vllm._rows import KeyGroups, Rows, hashes_of

ROW = 64
SPACES = {0: space(page_nbytes=ROW), 2: space(page_nbytes=ROW, pool="draft")}


def key(number: int, group: int) -> bytes:
    return bytes([number]) * 32 + group.to_bytes(4, "big")


def rows(count: int = 4) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int8]], Rows]:
    memory = np.zeros((count, ROW), dtype=np.int8)
    return memory, Rows(memory.data)


def test_a_page_is_a_row() -> None:
    memory, of_memory = rows()
    (page,) = of_memory.pages([2])
    page.segments[0][:] = b"x" * ROW

    assert [0, 0, ord("x"), 0] == memory[:, 0].tolist()
    assert ROW == page.nbytes == of_memory.nbytes


def test_the_number_of_the_group_decides_the_key_space() -> None:
    """Several groups may have a block with the same hash."""
    groups = KeyGroups(SPACES)

    assert [(SPACES[0], [key(1, 0)]), (SPACES[2], [key(1, 2)])] == groups.of_keys(
        [key(1, 0), key(1, 2)]
    )
    assert ["01" * 32] == hashes_of([key(1, 2)])


def test_pages_keep_their_chunks() -> None:
    """vLLM passes keys and chunks in the arbitrary order of a set."""
    memory, of_memory = rows()
    memory[:] = np.arange(4, dtype=np.int8)[:, None]
    keys = [key(5, 2), key(6, 0), key(7, 2)]

    of_batch, batches = KeyGroups(SPACES).batches(keys, [3, 1, 0], of_memory)

    assert [[key(5, 2), key(7, 2)], [key(6, 0)]] == of_batch
    assert [SPACES[2], SPACES[0]] == [batch.space for batch in batches]
    assert [[3, 0], [1]] == [[page.tobytes()[0] for page in batch.pages] for batch in batches]
    assert [hashes_of(keys) for keys in of_batch] == [batch.hashes for batch in batches]


def test_a_short_hash_is_refused() -> None:
    with pytest.raises(ValueError, match="xxhash"):
        KeyGroups(SPACES).of_keys([bytes(20)])


def test_each_key_needs_a_chunk() -> None:
    with pytest.raises(ValueError, match="zip"):
        KeyGroups(SPACES).batches([key(1, 0)], [], rows()[1])
