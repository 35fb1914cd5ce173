"""Tests the adapters of SGLang's backends: the keys of a key space, and round trips of pages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from field.sglang.engine import (
    EngineSettings,
    page_key,
    pool_keys,
    storage_config,
)
from field.sglang.file import SGLangFile
from field.sglang.hf3fs import SGLangHF3FS

from hicache_storage import KeySpace, Page, Shard
from hicache_storage.errors import UnsupportedOperation

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_storage import HiCacheStorage

HASH = "ab" * 32
SPACE = KeySpace(
    model="org/model",
    dtype="bfloat16",
    layout="page_first",
    page_tokens=16,
    page_nbytes=64,
    shard=Shard(layers=(0, 16), heads=(4, 8)),
)


def place_of(space: KeySpace) -> dict[str, Any]:
    config = storage_config(space, EngineSettings())
    names = ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size")
    return {name: getattr(config, name) for name in (*names, "is_mla_model", "model_name")}


def test_a_shard_is_the_rank_that_holds_it() -> None:
    expected: dict[str, Any] = {
        "tp_rank": 1,
        "tp_size": 4,
        "pp_rank": 0,
        "pp_size": 2,
        "attn_cp_rank": 0,
    }
    expected |= {"attn_cp_size": 1, "is_mla_model": False, "model_name": "org/model"}

    assert expected == place_of(SPACE)


def test_a_shard_without_heads_is_mla() -> None:
    place = place_of(replace(SPACE, shard=Shard(layers=(16, 32), context=(1, 2))))

    assert (0, 1, 1, 2, 1, 2, True, "org/model") == tuple(place.values())


@pytest.mark.parametrize("layers", [(0, 31), (1, 32), (16, 48), (8, 24)])
def test_a_shard_of_no_equal_cut_is_refused(layers: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedOperation, match="equal parts"):
        storage_config(replace(SPACE, shard=Shard(layers=layers)), EngineSettings())


@pytest.mark.parametrize("change", [{"tenant": "a"}, {"page_tokens": 32}])
def test_tenant_and_tokens_are_in_the_page_hash(change: dict[str, Any]) -> None:
    assert page_key(SPACE, HASH) != page_key(replace(SPACE, **change), HASH)


@pytest.mark.parametrize("change", [{"dtype": "x"}, {"layout": "x"}, {"revision": "x"}])
def test_fields_that_the_engine_does_not_pass_on_are_in_no_key(change: dict[str, Any]) -> None:
    assert page_key(SPACE, HASH) == page_key(replace(SPACE, **change), HASH)


def test_a_pool_is_the_end_of_a_key() -> None:
    assert [page_key(SPACE, HASH) + ".draft"] == pool_keys(replace(SPACE, pool="draft"), [HASH])


@pytest.mark.parametrize("storage_class", [SGLangFile, SGLangHF3FS])
def test_pages_come_back(storage_class: type[HiCacheStorage], tmp_path: Path) -> None:
    data = bytes(range(64))
    with storage_class.from_config({"path": str(tmp_path)}) as store:
        store.open_space(SPACE)
        stored = store.batch_set(SPACE, [HASH], [Page(bytearray(data))])
        page = Page(bytearray(64))
        found = store.batch_get(SPACE, [HASH], [page])

    assert ([True], [True], data) == (stored, found, page.tobytes())


def test_a_file_is_named_as_sglang_names_it(tmp_path: Path) -> None:
    with SGLangFile.from_config({"path": str(tmp_path)}) as store:
        store.batch_set(SPACE, [HASH], [Page(bytearray(64))])

    assert [f"{page_key(SPACE, HASH)}_org-model_1_4_2_0.bin"] == [
        path.name for path in tmp_path.iterdir()
    ]
