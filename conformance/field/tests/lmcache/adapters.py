"""Tests the adapters of LMCache: keys, round trips, tasks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from field.lmcache.fs import LMCacheFiles, LMCacheFs, LMCacheFsNative
from field.lmcache.resp import LMCacheResp
from field.lmcache.s3 import LMCacheS3
from s3_kit import BucketHost
from servers import RedisServer

from hicache_storage import KeySpace, Page, UnsupportedOperation
from hicache_storage.keys import Shard

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from field.lmcache.engine import LMCacheStorage

SPACE = KeySpace(
    model="org/m",
    dtype="bfloat16",
    layout="page_first",
    page_tokens=64,
    page_nbytes=1000,
    shard=Shard(layers=(16, 32), heads=(4, 8)),
)
HASH = "ab" * 32


@pytest.fixture(params=["fs", "fs_native", "resp", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[LMCacheStorage, None, None]:
    if request.param == "resp":
        with (
            RedisServer(tmp_path) as server,
            LMCacheResp.from_config({"host": "127.0.0.1", "port": server.port}) as opened,
        ):
            yield opened
        return
    if request.param == "s3":
        with BucketHost(tmp_path) as bucket, LMCacheS3.from_config(bucket.config) as opened:
            yield opened
        return
    kind: type[LMCacheFiles] = LMCacheFs if request.param == "fs" else LMCacheFsNative
    with kind.from_config({"path": str(tmp_path)}) as opened:
        yield opened


def key_of(store: LMCacheStorage, **changes: Any) -> Any:
    (key,) = store.object_keys(replace(SPACE, **changes), [HASH])
    return key


class TestLMCacheStorage:
    def test_gives_back_what_was_set(self, store: LMCacheStorage) -> None:
        page, target = Page(bytearray(b"x" * 1000)), Page(bytearray(1000))

        assert store.batch_set(SPACE, [HASH], [page]) == [True]
        assert store.batch_exists(SPACE, [HASH]) == [True]
        assert store.batch_get(SPACE, [HASH], [target]) == [True]
        assert target.tobytes() == page.tobytes()

    def test_answers_each_page_of_a_batch(self, store: LMCacheStorage) -> None:
        there, absent = HASH, "cd" * 32
        pages = [Page(bytearray(1000)) for _ in range(3)]
        store.batch_set(SPACE, [there], [Page(bytearray(b"x" * 1000))])

        assert store.batch_get(SPACE, [absent, there, absent], pages) == [False, True, False]
        assert pages[1].tobytes() == b"x" * 1000

    def test_deletes(self, store: LMCacheStorage) -> None:
        store.batch_set(SPACE, [HASH], [Page(bytearray(1000))])
        store.batch_delete(SPACE, [HASH])

        assert store.batch_exists(SPACE, [HASH]) == [False]

    def test_has_the_rank_of_its_shard_in_the_key(self, store: LMCacheStorage) -> None:
        """In stage 2 of 2, the second of four parts of the 16 heads belongs to rank 5 of 8 (from 0)."""
        assert key_of(store).kv_rank == 8 << 24 | 5 << 16 | 8 << 8 | 5
        assert key_of(store, shard=Shard(layers=(16, 32))).kv_rank == 2 << 24 | 1 << 16 | 2 << 8 | 1

    def test_refuses_a_shard_that_no_rank_holds(self, store: LMCacheStorage) -> None:
        with pytest.raises(UnsupportedOperation, match="heads 3 to 8 of 16"):
            store.open_space(replace(SPACE, shard=Shard(layers=(0, 32), heads=(3, 8))))

    def test_has_model_tenant_and_pool_in_the_key(self, store: LMCacheStorage) -> None:
        key = key_of(store, pool="draft", tenant="t1")

        assert (key.model_name, key.cache_salt, key.object_group_id) == ("org/m", "t1", 1)

    def test_has_the_page_tokens_in_the_chunk_hash(self, store: LMCacheStorage) -> None:
        assert key_of(store, page_tokens=16).chunk_hash != key_of(store).chunk_hash

    @pytest.mark.parametrize("changes", [{"dtype": "float8_e4m3fn"}, {"layout": "page_head"}])
    def test_has_nothing_else_in_the_key(
        self, store: LMCacheStorage, changes: dict[str, str]
    ) -> None:
        assert key_of(store, **changes) == key_of(store)
