"""The read-only half of `hf3fs`: it changes nothing, whatever state the index is in."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import hf3fs_redis
import pytest
from hf3fs_roots import HASHES, NBYTES, SLOT_NBYTES, SPACE, child, hits, opened, stored
from looks import look, read_only_mount, snapshot
from pages import blank, hash_of
from servers import RedisServer

from hicache_storage.errors import ConfigError, StorageUnavailable
from hicache_storage.registry import open_storage
from hicache_storage.storage import HiCacheStorage

PAGES = range(20)


def reader(root: Path, **config: Any) -> HiCacheStorage:
    return open_storage("hf3fs", {"path": str(root), **config}, read_only=True)


def closed(root: Path) -> None:
    """Leave a store whose engines ended in order, so that its SQLite index has no log."""
    with opened(root) as storage:
        stored(storage, PAGES)


_CRASH = """
import os, sys
from hf3fs_roots import opened, stored
from pathlib import Path
storage = opened(Path(sys.argv[1]))
stored(storage, range(20))
print("stored", flush=True)
sys.stdin.read()
"""


def crashed(root: Path) -> None:
    """Leave a store whose engine was killed, so that its last pages are only in the index's log."""
    with child(_CRASH, root) as (pid, output):
        assert "stored\n" == output.readline()
        os.kill(pid, signal.SIGKILL)


def spoil(root: Path) -> None:
    """Add what a store may also contain: a damaged slot, a foreign file, a dead writer."""
    with (root / "spaces" / SPACE.id / "slots-0000").open("r+b") as file:
        file.write(b"\xff" * 8)
    (root / "novel.txt").write_text("precious")
    (root / "writers" / ("0" * 16)).touch()


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"capacity_nbytes": 20 * SLOT_NBYTES},
        {"capacity_nbytes": 2 * SLOT_NBYTES},
    ],
    ids=["no-limit", "at-capacity", "stale-capacity"],
)
@pytest.mark.parametrize("make", [closed, crashed])
class TestLooking:
    def test_it_changes_nothing(
        self, root: Path, make: Callable[[Path], None], limits: dict[str, int]
    ) -> None:
        make(root)
        spoil(root)
        before = snapshot(root)
        with reader(root, **limits) as storage:
            assert 19 == sum(look(storage, SPACE, HASHES[:20]))
        assert before == snapshot(root)

    def test_it_works_on_a_read_only_mount(
        self, root: Path, tmp_path: Path, make: Callable[[Path], None], limits: dict[str, int]
    ) -> None:
        make(root)
        spoil(root)
        before = snapshot(root)
        with read_only_mount(root, tmp_path / "mount") as mount, reader(mount, **limits) as storage:
            assert 19 == sum(look(storage, SPACE, HASHES[:20]))
        assert before == snapshot(root)


class TestBesideAnEngine:
    def test_pages_of_a_running_engine_are_found(self, root: Path) -> None:
        with opened(root) as engine, reader(root) as storage:
            stored(engine, PAGES)
            before = {name for name in snapshot(root) if name != "."}
            assert [True] * 20 == look(storage, SPACE, HASHES[:20])
            assert before == {name for name in snapshot(root) if name != "."}

    def test_an_engine_that_opens_an_idle_store_during_a_read_makes_it_no_hit(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The engine may have given the slot to another page while the reader read it."""
        closed(root)
        capacity = {"capacity_nbytes": 20 * SLOT_NBYTES}
        with reader(root) as storage:
            inner: Any = storage
            transfers = inner.inner._mount.get()._transfers
            real = transfers.read

            def read(*args: Any) -> Any:
                with opened(root, **capacity) as engine:
                    stored(engine, range(30, 40))
                return real(*args)

            monkeypatch.setattr(transfers, "read", read)
            with pytest.raises(StorageUnavailable, match="during the call"):
                storage.batch_get(SPACE, HASHES[:1], [blank(NBYTES)])

    def test_a_page_that_is_evicted_during_a_read_is_no_hit(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with opened(root) as engine, reader(root) as storage:
            stored(engine, PAGES)
            inner: Any = storage
            transfers = inner.inner._mount.get()._transfers
            real = transfers.read

            def read(*args: Any) -> Any:
                found = real(*args)
                engine.batch_delete(SPACE, HASHES[:1])
                return found

            monkeypatch.setattr(transfers, "read", read)
            targets = [blank(NBYTES), blank(NBYTES)]

            assert [False, True] == storage.batch_get(SPACE, HASHES[:2], targets)


def test_a_missing_index_is_not_made(root: Path) -> None:
    closed(root)
    (root / "index.sqlite").unlink()
    before = snapshot(root)
    with pytest.raises(StorageUnavailable, match="will be rebuilt when an engine opens"):
        reader(root)

    assert before == snapshot(root)


@pytest.mark.parametrize("damage", [b"", b"notes" * 1000, b"SQLite format 3\0" + b"x" * 5000])
def test_a_damaged_index_is_told_with_what_makes_it_anew(root: Path, damage: bytes) -> None:
    closed(root)
    (root / "index.sqlite").write_bytes(damage)
    with pytest.raises(StorageUnavailable, match="will be rebuilt when an engine opens"):
        reader(root)

    with opened(root) as storage:
        assert [] != list(storage.scan(SPACE))


def test_figures_and_times(root: Path) -> None:
    before_s = time.time()
    closed(root)
    with reader(root, capacity_nbytes="1GiB", touch_interval_s=7) as storage:
        stats = storage.stats()
        found, absent = storage.page_times(SPACE, [hash_of(0), hash_of(50)])

    assert (20 * SLOT_NBYTES, 1 << 30) == (stats.nbytes, stats.capacity_nbytes)
    assert found.written_at_s is not None
    assert found.used_at_s is not None
    assert before_s <= found.written_at_s <= found.used_at_s <= time.time()
    assert 7 == found.used_within_s
    assert absent.written_at_s is None


class TestFaults:
    def test_a_page_that_its_slot_does_not_hold_is_one(self, root: Path) -> None:
        closed(root)
        spoil(root)
        with reader(root) as storage:
            assert [] == list(storage.faults(SPACE))
            (found,) = storage.faults(SPACE, HASHES)

        assert "corrupt" == found.reason

    def test_the_storage_that_writes_heals_none_by_it(self, root: Path) -> None:
        closed(root)
        spoil(root)
        with opened(root) as storage:
            assert 1 == len(list(storage.faults(SPACE, HASHES)))
            assert 1 == len(list(storage.faults(SPACE, HASHES)))


class TestDiagnosis:
    @pytest.mark.parametrize(
        ("slots", "fact"), [(30, None), (20, "high watermark"), (5, "would evict")]
    )
    def test_it_compares_the_used_bytes_with_the_capacity(
        self, root: Path, slots: int, fact: str | None
    ) -> None:
        closed(root)
        with reader(root, capacity_nbytes=slots * SLOT_NBYTES) as storage:
            found = storage.diagnose()

        assert [bool(fact)] == [one.is_full for one in found]
        assert all((fact or "are free") in one.fact for one in found)

    def test_times_from_the_future_are_counted(self, root: Path) -> None:
        closed(root)
        with closing(sqlite3.connect(root / "index.sqlite")) as db:
            db.execute("UPDATE pages SET used_ns = ? WHERE slot < 3", (time.time_ns() * 2,))
            db.commit()
        with reader(root) as storage:
            (found,) = storage.diagnose()

        assert ("clock", "3 pages with a time of use in the future") == (found.topic, found.fact)


def kept(client: Any) -> dict[bytes, bytes]:
    """Return everything in a Redis server."""
    return {key: client.dump(key) for key in client.scan_iter()}


class TestRedis:
    def test_it_changes_nothing_there_either(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        with RedisServer(tmp_path / "redis") as server:
            with hf3fs_redis.opened(server, root) as storage:
                hf3fs_redis.stored(storage, PAGES)
            with hf3fs_redis.client_of(server) as client:
                before = snapshot(root), kept(client)
                capacity = 2 * hf3fs_redis.SLOT_NBYTES
                with reader(root, index=server.url, capacity_nbytes=capacity) as storage:
                    found = look(storage, hf3fs_redis.SPACE, HASHES[:20])
                    assert [True] == [one.is_full for one in storage.diagnose()]

                assert [True] * 20 == found
                assert before == (snapshot(root), kept(client))

    def test_a_lost_index_is_not_made(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        with RedisServer(tmp_path / "redis") as server:
            with hf3fs_redis.opened(server, root) as storage:
                hf3fs_redis.stored(storage, PAGES)
            with hf3fs_redis.client_of(server) as client:
                state = f"hicache:hf3fs:{{{(root / 'root-id').read_text()}}}:state"
                client.delete(state)
                with (
                    reader(root, index=server.url) as storage,
                    pytest.raises(StorageUnavailable, match="an engine must open"),
                ):
                    storage.batch_exists(hf3fs_redis.SPACE, HASHES)
                assert 0 == client.exists(state)


class TestTheIndexOfARoot:
    def test_a_sqlite_root_refuses_redis(self, root: Path) -> None:
        closed(root)
        before = snapshot(root)
        for read_only in (True, False):
            with pytest.raises(ConfigError, match=r"index: the index of .* is sqlite"):
                open_storage(
                    "hf3fs", {"path": str(root), "index": "redis://nowhere"}, read_only=read_only
                )

        assert before == snapshot(root)

    def test_a_redis_root_refuses_sqlite_and_other_servers(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        with RedisServer(tmp_path / "redis") as server, RedisServer(tmp_path / "b") as other:
            with hf3fs_redis.opened(server, root) as storage:
                hf3fs_redis.stored(storage, PAGES)
            before = snapshot(root)
            for read_only in (True, False):
                with pytest.raises(ConfigError, match="is a Redis server"):
                    open_storage("hf3fs", {"path": str(root)}, read_only=read_only)
                for url in (other.url, f"{server.url.removesuffix('/0')}/1"):
                    with pytest.raises(ConfigError, match="does not hold it"):
                        open_storage(
                            "hf3fs", {"path": str(root), "index": url}, read_only=read_only
                        )

            assert {**before, "writers": None} == {**snapshot(root), "writers": None}

    def test_another_name_of_its_server_is_let_in(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        with RedisServer(tmp_path / "redis") as server:
            with hf3fs_redis.opened(server, root) as storage:
                hf3fs_redis.stored(storage, PAGES)
            url = server.url.replace("127.0.0.1", "localhost")
            assert url != server.url
            with hf3fs_redis.opened(server, root, index=url) as storage:
                assert [True] * 20 == hf3fs_redis.hits(storage, PAGES)

    def test_a_redis_root_of_an_earlier_release_is_known_by_its_id(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        with RedisServer(tmp_path / "redis") as server:
            with hf3fs_redis.opened(server, root) as storage:
                hf3fs_redis.stored(storage, PAGES)
            (root / "index.redis").unlink()
            with pytest.raises(ConfigError, match="is a Redis server"):
                reader(root)
            with hf3fs_redis.opened(server, root) as storage:
                assert [True] * 20 == hf3fs_redis.hits(storage, PAGES)
            assert (root / "index.redis").read_text().startswith("127.0.0.1:")

    def test_a_root_with_two_indexes_says_what_to_do(self, root: Path) -> None:
        closed(root)
        (root / "root-id").write_text("0" * 16)
        with pytest.raises(ConfigError, match=r"two indexes.*remove index\.sqlite and lock"):
            reader(root)
        (root / "root-id").unlink()
        with opened(root) as storage:
            assert [True] * 20 == hits(storage, PAGES)


def test_the_last_access_times_reach_the_index_without_another_call(root: Path) -> None:
    with opened(root, capacity_nbytes="1GiB", touch_interval_s=0.2) as storage:
        stored(storage, range(1))
        hits(storage, range(1))
        read_at_s = time.time()
        hits(storage, range(1))
        end_s = time.monotonic() + 20
        while time.monotonic() < end_s:
            (found,) = storage.page_times(SPACE, HASHES[:1])
            if found.used_at_s is not None and found.used_at_s >= read_at_s:
                return
            time.sleep(0.05)
    raise AssertionError("the access time never came")


@pytest.mark.parametrize(
    "config",
    [{}, {"direct": True}, {"direct": False, "capacity_nbytes": 1 << 30}, {"parallelism": 3}],
)
@pytest.mark.parametrize("mount", ["rw", "ro"])
def test_both_openings_claim_the_same(
    root: Path, config: dict[str, Any], mount: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(root, **config) as storage:
        stored(storage, PAGES)
        claimed = storage.capabilities
    if mount == "ro":  # the mount refuses an unnamed file, and then a manifest tells
        monkeypatch.setattr(os, "O_TMPFILE", os.O_CREAT | os.O_EXCL)
        monkeypatch.setattr(os, "open", refusing_new_files(os.open))

    with reader(root, **config) as looking:
        assert claimed == looking.capabilities


def refusing_new_files(real: Callable[..., int]) -> Callable[..., int]:
    """Return `os.open` as of a read-only mount."""

    def call(path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, flags, mode, **rest)

    return call
