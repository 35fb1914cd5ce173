"""A read-only storage changes no object, and a key space is removed with its manifest."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hicache_backends.s3 import S3Storage, storage
from hicache_backends.s3.bucket import Bucket
from hicache_backends.s3.client import Client
from hicache_backends.s3.layout import Layout
from pages import blank, hash_of, page, space
from s3_kit import BUCKET, config_of, name_of, plain_client, write_object
from s3_script import ScriptedS3, reply, size
from servers import Ministack

from hicache_storage.backend_support import registrations
from hicache_storage.errors import ConfigError
from hicache_storage.registry import open_storage
from hicache_storage.storage import HiCacheStorage, PageFault, UnreadableKind, UnreadableSpace

SPACE, LOST, DAMAGED, EMPTY = space(), space(model="lost"), space(model="dam"), space(model="empty")
HASHES = [hash_of(number) for number in range(6)]
SHORT, LONG, GONE = HASHES[:3]
FAULTS = {
    PageFault(SHORT, "wrong_size", "it is 5 bytes long instead of 4,096"),
    PageFault(LONG, "wrong_size", "it is 4,097 bytes long instead of 4,096"),
}
UNREADABLE = {
    UnreadableSpace(LOST.id, UnreadableKind.DAMAGED, "its manifest is lost"),
    UnreadableSpace(DAMAGED.id, UnreadableKind.DAMAGED, "its manifest is damaged"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ministack]:
    with Ministack(tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture
def prefix() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def filled(server: Ministack, prefix: str) -> Iterator[S3Storage]:
    """Yield a store with damaged pages, damaged manifests and foreign objects."""
    layout = Layout(f"{prefix}/")
    with S3Storage.from_config(config_of(server, prefix)) as opened:
        for one in (SPACE, LOST, DAMAGED, EMPTY):
            opened.open_space(one)
        for one in (SPACE, LOST, DAMAGED):
            assert all(opened.batch_set(one, HASHES, [page(seed=1)] * len(HASHES)))
        write_object(server, name_of(SPACE, SHORT, prefix), b"short")
        write_object(server, name_of(SPACE, LONG, prefix), b"x" * 4097)
        write_object(server, name_of(SPACE, GONE, prefix), None)
        write_object(server, layout.manifest(LOST.id), None)
        write_object(server, layout.manifest(DAMAGED.id), b'{"model": "dam')
        for name in strangers(prefix):
            write_object(server, name, b"x")
        yield opened


def strangers(prefix: str) -> list[str]:
    return [f"{prefix}/other", f"{prefix}/{'0' * 32}/other", f"{prefix}/{SPACE.id}/ab/no-hash"]


def objects(server: Ministack, prefix: str) -> dict[str, Any]:
    with plain_client(server) as client:
        listed: Any = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")
    return {one["Key"]: (one["ETag"], one["LastModified"]) for one in listed["Contents"]}


def look(opened: HiCacheStorage) -> None:
    """Make every call of a program that only looks."""
    opened.open_space(space(model="other"))
    assert {SPACE, EMPTY} == set(opened.spaces())
    assert set(HASHES[3:]) == {info.page_hash for info in opened.scan(SPACE)}
    assert FAULTS == set(opened.faults(SPACE))
    assert FAULTS == set(opened.faults(SPACE, HASHES))
    assert UNREADABLE == set(opened.unreadable_spaces())
    assert [False] * 3 + [True] * 3 == opened.batch_exists(SPACE, HASHES)
    pages = [blank() for _ in HASHES]
    assert [False] * 3 + [True] * 3 == opened.batch_get(SPACE, HASHES, pages)
    opened.page_times(SPACE, HASHES)
    opened.diagnose()
    opened.stats()


@pytest.mark.parametrize("checksum", ["none", "crc32"])
@pytest.mark.usefixtures("filled")
def test_looking_changes_no_object(server: Ministack, prefix: str, checksum: str) -> None:
    before = objects(server, prefix)

    with open_storage("s3", config_of(server, prefix, checksum=checksum), read_only=True) as opened:
        look(opened)

    assert before == objects(server, prefix)


def test_looking_creates_no_bucket(server: Ministack) -> None:
    with pytest.raises(ConfigError, match="not-there is not there: create it"):
        open_storage("s3", config_of(server, bucket="not-there"), read_only=True)


def test_few_bytes_of_pages_are_looked_at_at_once(
    filled: S3Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only so many pages are read at once that even a slow store returns them before the deadline."""
    monkeypatch.setattr(storage, "_LOOKED_AT_ONCE_NBYTES", 2 * SPACE.stored_nbytes)
    run, counts = Client.run, list[int]()

    def counted(client: Client, calls: Sequence[Any], deadline: Any) -> list[Any]:
        counts.append(len(calls))
        return run(client, calls, deadline)

    monkeypatch.setattr(Client, "run", counted)
    assert set(filled.faults(SPACE, HASHES)) == FAULTS

    assert max(counts) == 2


def test_a_page_with_another_checksum_is_told_and_stays() -> None:
    wrong = reply(200, page(seed=1).tobytes(), headers={"x-amz-checksum-crc32": "AAAAAA=="})
    with ScriptedS3() as played:
        config = played.config(checksum="crc32")
        with open_storage("s3", config, read_only=True) as opened:
            played.script.extend([wrong, size(4096), wrong])

            assert [False] == opened.batch_get(SPACE, HASHES[:1], [blank()])
            (found,) = opened.faults(SPACE, HASHES[:1])

        assert (HASHES[0], "corrupt") == (found.page_hash, found.reason)
        assert ["GET", "HEAD", "GET"] == played.methods


class TestRemoveSpace:
    @pytest.mark.parametrize(
        ("removed", "pages"), [(SPACE, 3), (LOST, 6), (DAMAGED, 6), (EMPTY, 0)]
    )
    def test_pages_and_manifest_go_and_nothing_else(
        self, server: Ministack, prefix: str, filled: S3Storage, removed: Any, pages: int
    ) -> None:
        before = objects(server, prefix)

        assert pages == filled.remove_space(removed.id)
        assert 0 == filled.remove_space(removed.id)

        left = {name for name in before if removed.id not in name or name in strangers(prefix)}
        assert left == objects(server, prefix).keys()
        assert removed not in set(filled.spaces())

    @pytest.mark.parametrize("space_id", ["", "..", "0" * 32, "spaces"])
    def test_an_unknown_one_has_no_pages(
        self, server: Ministack, prefix: str, filled: S3Storage, space_id: str
    ) -> None:
        before = objects(server, prefix)

        assert 0 == filled.remove_space(space_id)
        assert before == objects(server, prefix)

    @pytest.mark.parametrize("is_early", [True, False])
    def test_one_that_is_written_to_meanwhile_stays_with_its_manifest(
        self,
        server: Ministack,
        prefix: str,
        filled: S3Storage,
        monkeypatch: pytest.MonkeyPatch,
        *,
        is_early: bool,
    ) -> None:
        """The manifest stays if the page is set early in the removal, and is restored if late."""
        delete, late = Bucket.delete, hash_of(99)

        def and_then_set(bucket: Bucket, names: Sequence[str], deadline: Any) -> dict[str, str]:
            kept = delete(bucket, names, deadline)
            if is_early or names == [Layout(f"{prefix}/").manifest(SPACE.id)]:
                writer.batch_set(SPACE, [late], [page(seed=1)])
            return kept

        with S3Storage.from_config(config_of(server, prefix)) as writer:
            writer.open_space(SPACE)
            monkeypatch.setattr(Bucket, "delete", and_then_set)

            assert 3 == filled.remove_space(SPACE.id)
            assert {SPACE, EMPTY} == set(filled.spaces())
            assert [late] == [info.page_hash for info in filled.scan(SPACE)]

    def test_a_writer_puts_the_manifest_back(
        self, filled: S3Storage, server: Ministack, prefix: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A writer had the key space open, which was empty when another storage removed it."""
        monkeypatch.setattr(registrations, "_INTERVAL_S", 0.0)
        with S3Storage.from_config(config_of(server, prefix)) as writer:
            writer.open_space(EMPTY)
            filled.remove_space(EMPTY.id)
            assert EMPTY not in set(filled.spaces())

            writer.batch_set(EMPTY, HASHES[:1], [page(seed=1)])
            assert EMPTY in set(filled.spaces())

    def test_a_writer_of_many_key_spaces_puts_the_manifest_of_a_forgotten_one_back(
        self, filled: S3Storage, server: Ministack, prefix: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(registrations, "_MOST_SPACES", 1)
        with S3Storage.from_config(config_of(server, prefix)) as writer:
            writer.open_space(EMPTY)
            writer.open_space(SPACE)
            filled.remove_space(EMPTY.id)

            writer.batch_set(EMPTY, HASHES[:1], [page(seed=1)])
            assert EMPTY in set(filled.spaces())
