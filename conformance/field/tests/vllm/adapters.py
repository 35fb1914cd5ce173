"""Tests the adapter of vLLM's `fs` tier: keys, round trips, jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from field.vllm.engine import POOLS
from field.vllm.fs import VllmFs

from hicache_storage import KeySpace, Page, StorageClosed, UnsupportedOperation
from hicache_storage.keys import Shard

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

SPACE = KeySpace(
    model="org/m",
    dtype="bfloat16",
    layout="page_first",
    page_tokens=16,
    page_nbytes=5000,
    shard=Shard(layers=(0, 32), heads=(0, 8)),
)
ROW_NBYTES = 8192
HASH = "ab" * 32
MANY = [f"{number:064x}" for number in range(150)]
"""More pages than a CPU tier has rows."""


@pytest.fixture
def store(tmp_path: Path) -> Generator[VllmFs, None, None]:
    with VllmFs.from_config({"path": str(tmp_path)}) as opened:
        yield opened


def page_of(number: int) -> Page:
    return Page(bytearray([number]) * SPACE.page_nbytes)


class TestVllmFs:
    def test_gives_back_what_was_set(self, store: VllmFs) -> None:
        target = page_of(0)

        assert store.batch_set(SPACE, [HASH], [page_of(1)]) == [True]
        assert store.batch_exists(SPACE, [HASH]) == [True]
        assert store.batch_get(SPACE, [HASH], [target]) == [True]
        assert target.tobytes() == page_of(1).tobytes()

    def test_gives_back_more_pages_than_there_are_rows(self, store: VllmFs) -> None:
        targets = [page_of(0) for _ in MANY]

        assert all(store.batch_set(SPACE, MANY, [page_of(n) for n in range(len(MANY))]))
        assert all(store.batch_get(SPACE, MANY, targets))
        assert [page_of(n).tobytes() for n in range(len(MANY))] == [t.tobytes() for t in targets]

    def test_answers_each_page_of_a_batch(self, store: VllmFs) -> None:
        absent, targets = "cd" * 32, [page_of(0) for _ in range(3)]
        store.batch_set(SPACE, [HASH], [page_of(1)])

        assert store.batch_get(SPACE, [absent, HASH, absent], targets) == [False, True, False]
        assert targets[1].tobytes() == page_of(1).tobytes()

    def test_loads_a_page_that_is_twice_in_a_batch(self, store: VllmFs) -> None:
        targets = [page_of(0), page_of(0)]
        store.batch_set(SPACE, [HASH, HASH], [page_of(1), page_of(1)])

        assert store.batch_get(SPACE, [HASH, HASH], targets) == [True, True]
        assert [page_of(1).tobytes()] * 2 == [target.tobytes() for target in targets]

    def test_keeps_a_page_as_a_row_of_whole_blocks(self, store: VllmFs) -> None:
        store.batch_set(SPACE, [HASH], [page_of(1)])
        data = store.path_of(SPACE, HASH).read_bytes()

        assert ROW_NBYTES == len(data)
        assert page_of(1).tobytes() == data[: SPACE.page_nbytes]

    def test_finds_pages_of_an_engine_before(self, store: VllmFs, tmp_path: Path) -> None:
        store.batch_set(SPACE, [HASH], [page_of(1)])

        with VllmFs.from_config({"path": str(tmp_path)}) as other:
            assert other.batch_exists(SPACE, [HASH]) == [True]

    def test_deletes_nothing(self, store: VllmFs) -> None:
        with pytest.raises(UnsupportedOperation):
            store.batch_delete(SPACE, [HASH])

    def test_unlinks_files_where_it_is_told_to(self, tmp_path: Path) -> None:
        with VllmFs.from_config({"path": str(tmp_path), "unlinks": True}) as store:
            store.batch_set(SPACE, [HASH], [page_of(1)])
            store.batch_delete(SPACE, [HASH])

            assert store.batch_exists(SPACE, [HASH]) == [False]

    def test_takes_no_call_after_close(self, store: VllmFs) -> None:
        store.batch_exists(SPACE, [HASH])
        store.close()

        with pytest.raises(StorageClosed):
            store.batch_exists(SPACE, [HASH])


class TestKeys:
    @pytest.mark.parametrize(
        "changes",
        [
            {"model": "org/n"},
            {"dtype": "float16"},
            {"page_tokens": 32},
            {"pool": POOLS[1]},
            {"tenant": "t1"},
            {"shard": Shard(layers=(0, 16), heads=(0, 8))},
        ],
    )
    def test_a_field_that_vllm_passes_on_is_another_file(
        self, store: VllmFs, changes: dict[str, Any]
    ) -> None:
        assert store.path_of(SPACE, HASH) != store.path_of(replace(SPACE, **changes), HASH)

    @pytest.mark.parametrize(
        "changes",
        [
            {"layout": "page_head"},
            {"revision": "main"},
            {"page_nbytes": 2500},
            {"shard": Shard(layers=(0, 32))},
        ],
    )
    def test_any_other_field_is_not(self, store: VllmFs, changes: dict[str, Any]) -> None:
        assert store.path_of(SPACE, HASH) == store.path_of(replace(SPACE, **changes), HASH)

    @pytest.mark.parametrize(
        "changes",
        [
            {"shard": Shard(layers=(0, 32), heads=(0, 4))},
            {"shard": Shard(layers=(16, 32), heads=(0, 8))},
            {"shard": Shard(layers=(0, 32), context=(0, 2))},
            {"pool": "other"},
        ],
    )
    def test_a_part_of_a_row_is_refused(self, store: VllmFs, changes: dict[str, Any]) -> None:
        with pytest.raises(UnsupportedOperation, match=r"part of the model|none of the groups"):
            store.open_space(replace(SPACE, **changes))
