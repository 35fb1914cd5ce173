"""Asserts that a check finds each known defect of LMCache's adapters: `make field-lmcache-known`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from field.lmcache.fs import LMCacheFiles, LMCacheFs, LMCacheFsNative
from field.lmcache.resp import LMCacheResp
from field.lmcache.s3 import LMCacheS3
from hicache_conformance.checks import all_checks
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.run.subject import Subject
from s3_kit import BucketHost, read_object, write_object
from servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from hicache_conformance import Scratch
    from hicache_conformance.run.subject import Server

    from hicache_storage import KeySpace

pytestmark = pytest.mark.timeout(400)
CALL_LIMIT_S = 10.0


class FileStore(Subject):
    absent = LMCacheFiles.absent

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        return {"path": str(scratch.path)}


class Fs(FileStore):
    storage_class = LMCacheFs


class FsNative(FileStore):
    storage_class = LMCacheFsNative


class Resp(Subject):
    storage_class = LMCacheResp
    absent = LMCacheResp.absent
    test_server: ClassVar[RedisServer]

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        return {"host": "127.0.0.1", "port": self.test_server.port}

    def server(self) -> AbstractContextManager[Server]:
        return RedisServer(self.test_server.directory / "own", port=self.test_server.port)


class S3(Subject):
    storage_class = LMCacheS3
    absent = LMCacheS3.absent
    test_server: ClassVar[BucketHost]

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        return self.test_server.config

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        return read_object(self.test_server, self._object(space, page_hash), BucketHost.bucket)

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        write_object(self.test_server, self._object(space, page_hash), data, BucketHost.bucket)

    def _object(self, space: KeySpace, page_hash: str) -> str:
        with LMCacheS3.from_config(self.test_server.config) as store:
            return store.object_of(space, page_hash)


@pytest.fixture
def _redis(tmp_path: Path) -> Generator[None, None, None]:
    with RedisServer(tmp_path) as Resp.test_server:
        yield


@pytest.mark.parametrize("subject", [Fs, FsNative])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KV-003:a_page_of_another_size_is_no_hit", "batch_exists is True"),
        ("KV-101:a_page_is_not_seen_from_a_neighbour", "differs in dtype only"),
        ("KV-105:every_model_name_works", "batch_set refused"),
        ("KV-106:ranks_of_a_sharded_pool_share_nothing", "set by other ranks"),
        ("KV-403:an_extended_object_is_a_miss", "object is damaged"),
        ("KV-403:a_damaged_object_heals_when_it_is_set_after_a_miss", ""),
        ("KV-403:a_damaged_object_heals_when_it_is_set_unseen", ""),
        ("KV-404:a_flipped_bit_is_no_hit_without_the_page_store", "never set"),
    ],
)
def test_a_known_defect_of_files_is_found(subject: type[Subject], name: str, text: str) -> None:
    _expect_failure(subject, name, text)


@pytest.mark.usefixtures("_redis")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KV-101:a_page_is_not_seen_from_a_neighbour", "differs in dtype only"),
        ("KV-106:ranks_of_a_sharded_pool_share_nothing", "set by other ranks"),
        ("KV-003:sizes_under_one_hash_are_apart", "batch_get is False"),
        ("KV-503:a_page_deleted_between_exists_and_get_is_a_miss", "did not return"),
    ],
)
def test_a_known_defect_of_resp_is_found(name: str, text: str) -> None:
    _expect_failure(Resp, name, text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KV-003:sizes_under_one_hash_are_apart", "never set"),
        ("KV-101:a_page_is_not_seen_from_a_neighbour", "differs in dtype only"),
        ("KV-106:ranks_of_a_sharded_pool_share_nothing", "set by other ranks"),
        ("KV-403:a_damaged_object_is_a_miss", "cut by its last byte"),
        ("KV-403:an_extended_object_is_a_miss", "wrote outside the pages"),
        ("KV-404:a_flipped_bit_is_no_hit_without_the_page_store", "never set"),
        ("KV-502:a_page_deleted_elsewhere_is_gone_at_once", "deleted elsewhere"),
    ],
)
def test_a_known_defect_of_s3_is_found(name: str, text: str, tmp_path: Path) -> None:
    with BucketHost(tmp_path) as S3.test_server:
        _expect_failure(S3, name, text)


def _expect_failure(subject: type[Subject], name: str, text: str) -> None:
    (check,) = [one for one in all_checks() if one.name == name]

    record = run_check(subject, check, RunOptions(call_limit_s=CALL_LIMIT_S))

    assert Outcome.FAILED is record.outcome, record.message
    assert text in f"{record.message} {record.got} {record.expected}", record
