"""The `hf3fs` backend with its index in a real Redis server: leases, restarts, lost data."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hf3fs_redis import HASHES, SLOT_NBYTES, SPACE, client_of, hits, index_of, opened, stored
from hf3fs_roots import child
from hicache_backends.hf3fs import Hf3fsStorage
from hicache_backends.hf3fs.index import redis_scripts as scripts
from hicache_backends.hf3fs.layout import Layout
from hicache_backends.hf3fs.slot_files import SlotFiles
from hicache_conformance import FaultProxy
from pages import hash_of, page, space
from servers import RedisServer, wait_until

from hicache_storage import ConfigError, HiCacheError, StorageUnavailable
from hicache_storage.backend_support.deadline import Deadline


def shorten_leases(storage: Hf3fsStorage, lease_ms: int) -> None:
    index = index_of(storage)
    index._lease_ms = index._epoch._lease_ms = lease_ms


class TestSharing:
    def test_two_roots_share_a_server_and_no_page(
        self, server: RedisServer, tmp_path: Path
    ) -> None:
        with opened(server, tmp_path / "a") as one, opened(server, tmp_path / "b") as other:
            stored(one, range(4))

            assert [False] * 4 == other.batch_exists(SPACE, HASHES[:4])
            assert 0 == other.clear(SPACE)
            assert [True] * 4 == hits(one, range(4))

    def test_a_root_keeps_its_name_wherever_it_is_mounted(
        self, server: RedisServer, tmp_path: Path
    ) -> None:
        with opened(server, tmp_path / "a") as storage:
            stored(storage, range(4))
        (tmp_path / "a").rename(tmp_path / "b")
        with opened(server, tmp_path / "b") as storage:
            assert [True] * 4 == hits(storage, range(4))

    def test_two_writers_of_one_page_leak_no_slot(
        self, server: RedisServer, storage: Hf3fsStorage, tmp_path: Path
    ) -> None:
        with opened(server, tmp_path) as other:
            barrier = threading.Barrier(2)

            def write(each: Hf3fsStorage) -> None:
                for start in range(0, 60, 10):
                    barrier.wait(10)
                    stored(each, range(start, start + 10))

            threads = [threading.Thread(target=write, args=[each]) for each in (storage, other)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            stored(storage, range(60, 61))

            assert 61 * SLOT_NBYTES == storage.stats().nbytes


class TestEviction:
    def test_the_least_recently_used_go_first(self, server: RedisServer, tmp_path: Path) -> None:
        with opened(server, tmp_path, capacity_nbytes=10 * SLOT_NBYTES) as storage:
            stored(storage, range(9))
            assert [True] == hits(storage, range(1))
            stored(storage, range(20, 21))

            assert [True, True] == storage.batch_exists(SPACE, [HASHES[0], HASHES[20]])
            assert [False] == storage.batch_exists(SPACE, [HASHES[8]])
            assert 9 * SLOT_NBYTES >= (storage.stats().nbytes or 0)

    def test_all_key_spaces_share_the_capacity(self, server: RedisServer, tmp_path: Path) -> None:
        draft = space(pool="draft")
        with opened(server, tmp_path, capacity_nbytes=10 * SLOT_NBYTES) as storage:
            stored(storage, range(9))
            stored(storage, range(9), draft)

            assert (storage.stats().nbytes or 0) <= 10 * SLOT_NBYTES
            assert 9 == len(list(storage.scan(draft)))

    def test_readers_of_reused_slots_see_whole_pages_or_misses(
        self, server: RedisServer, tmp_path: Path
    ) -> None:
        limits = {"capacity_nbytes": 8 * SLOT_NBYTES, "high_watermark": 1, "low_watermark": 1}
        stop = threading.Event()
        wrong: list[BaseException] = []
        with opened(server, tmp_path, **limits) as storage, opened(server, tmp_path) as other:

            def read() -> None:
                try:
                    while not stop.is_set():
                        hits(other, range(20))
                except BaseException as error:  # noqa: BLE001 - raised below
                    wrong.append(error)

            reader = threading.Thread(target=read)
            reader.start()
            for turn in range(150):
                numbers = [(turn * 3 + n) % 20 for n in range(3)]
                storage.batch_set(
                    SPACE, [hash_of(n) for n in numbers], [page(seed=n) for n in numbers]
                )
            stop.set()
            reader.join()
            assert storage.stats().counters["evicted"] > 200

        assert [] == wrong


class TestLeases:
    def test_a_dead_writer_s_slots_come_back(
        self, storage: Hf3fsStorage, server: RedisServer, tmp_path: Path
    ) -> None:
        shorten_leases(storage, 50)
        files = storage._files_of(SPACE)
        lost = {place.slot for place in storage._mount.get().index.reserve(files, 8, Deadline(30))}
        with opened(server, tmp_path) as other:
            found = set[int]()

            def are_back() -> bool:
                found.update(_reserved(other, 8))
                return lost <= found

            wait_until(are_back)

    def test_a_page_that_took_longer_than_its_lease_never_shows(
        self, storage: Hf3fsStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shorten_leases(storage, 1)
        transfers = storage._mount.get()._transfers
        real = transfers.write

        def slow(*arguments: Any) -> list[int]:
            done: list[int] = real(*arguments)
            time.sleep(0.01)
            # Another storage's set takes the freed slots.
            assert _reserved(storage, 1)
            return done

        monkeypatch.setattr(transfers, "write", slow)
        with pytest.raises(StorageUnavailable, match="lease"):
            storage.batch_set(SPACE, HASHES[:1], [page()])

        assert [False] == storage.batch_exists(SPACE, HASHES[:1])


class TestLostData:
    def test_after_a_restart_nobody_uses_the_index_while_writers_may_be_at_work(
        self, tmp_path: Path
    ) -> None:
        with RedisServer(tmp_path / "redis") as server, opened(server, tmp_path / "r") as storage:
            stored(storage, range(8))
            shorten_leases(storage, 1000)
            server.stop()
            server.start()
            with pytest.raises(StorageUnavailable, match="restarted"):
                hits(storage, range(8))
            with pytest.raises(StorageUnavailable, match="restarted"):
                storage.batch_set(SPACE, HASHES[8:9], [page()])
            wait_until(lambda: _works(storage))

            assert [True] * 8 == hits(storage, range(8))

    def test_a_damaged_run_id_is_no_restart(self, server: RedisServer, tmp_path: Path) -> None:
        """The proxy flips a bit of the run id in the reply to INFO, which follows four short replies."""
        with FaultProxy(("127.0.0.1", server.port)) as proxy:
            url = f"redis://127.0.0.1:{proxy.address[1]}"
            with opened(server, tmp_path / "r", index=url) as storage, client_of(server) as client:
                stored(storage, range(8))
                info: bytes = client.eval("return redis.call('INFO', 'server')", 0)
                answer = b"+OK\r\n" + 3 * b"+QUEUED\r\n" + b"*3\r\n$%d\r\n%b" % (len(info), info)
                proxy.flip_after(answer.index(b"run_id:") + len(b"run_id:") + 5)

                assert [True] * 8 == hits(storage, range(8))
                assert 1 == proxy.flips

    def test_a_run_id_that_is_no_text_is_that_of_another_run(
        self, server: RedisServer, storage: Hf3fsStorage
    ) -> None:
        stored(storage, range(8))
        shorten_leases(storage, 1000)
        with client_of(server) as client:
            client.hset(f"{index_of(storage)._prefix}:state", "run", b"0123\xb7")
        with pytest.raises(StorageUnavailable, match="restarted"):
            hits(storage, range(8))
        wait_until(lambda: _works(storage))

        assert [True] * 8 == hits(storage, range(8))

    @pytest.mark.parametrize("time_us", ["inf", "-inf", "1e306"])
    def test_a_time_that_no_clock_has_is_unknown(
        self, server: RedisServer, storage: Hf3fsStorage, time_us: str
    ) -> None:
        stored(storage, range(2))
        with client_of(server) as client:
            client.zadd(f"{index_of(storage)._prefix}:lru", {f"{SPACE.id} {HASHES[0]}": time_us})

        known = index_of(storage).used_ns(storage._files_of(SPACE), HASHES[:2], Deadline(20))
        assert [HASHES[1]] == list(known)

    def test_lost_data_is_made_from_the_marks(self, tmp_path: Path) -> None:
        with RedisServer(tmp_path / "redis") as server, opened(server, tmp_path / "r") as storage:
            stored(storage, range(8))
            storage.batch_delete(SPACE, HASHES[:2])
            shorten_leases(storage, 100)
            with client_of(server) as client:
                client.flushall()
            wait_until(lambda: _works(storage))
            shorten_leases(storage, 60_000)

            assert [False] * 2 + [True] * 6 == hits(storage, range(8))
            stored(storage, range(64))
            assert [True] * 64 == hits(storage, range(64))
            assert 64 * SLOT_NBYTES == storage.stats().nbytes

    def test_an_index_that_somebody_else_makes_is_waited_for(
        self, server: RedisServer, storage: Hf3fsStorage
    ) -> None:
        index: Any = storage._mount.get().index
        with client_of(server) as client:
            client.hdel(f"{index._prefix}:state", "made")
            client.set(f"{index._prefix}:maker", "another", px=1500)
            with pytest.raises(StorageUnavailable, match="rebuilding"):
                hits(storage, range(1))
            wait_until(lambda: _works(storage))

    def test_an_index_that_was_built_since_a_look_is_not_built_again(
        self, server: RedisServer, storage: Hf3fsStorage
    ) -> None:
        stored(storage, range(4))
        epoch: Any = index_of(storage)._epoch
        built = epoch.require(Deadline(20))

        epoch._make()  # by a look from before it was built

        assert built == epoch.require(Deadline(20))
        assert [True] * 4 == hits(storage, range(4))
        with client_of(server) as client:
            assert not client.exists(f"{index_of(storage)._prefix}:maker")

    def test_an_open_waits_for_the_process_that_makes_the_index(
        self, server: RedisServer, storage: Hf3fsStorage, tmp_path: Path
    ) -> None:
        stored(storage, range(4))
        prefix = index_of(storage)._prefix
        with client_of(server) as client:
            client.hdel(f"{prefix}:state", "made")
            client.set(f"{prefix}:maker", "one that died while it made the index", px=700)

            with opened(server, tmp_path) as other:
                assert not client.exists(f"{prefix}:maker")
                assert [True] * 4 == hits(other, range(4))


class TestServer:
    def test_it_holds_no_pages(self, server: RedisServer, storage: Hf3fsStorage) -> None:
        stored(storage, range(4))
        index: Any = storage._mount.get().index
        with client_of(server) as client:
            keys = list(client.scan_iter(f"{index._prefix}*"))
            nbytes = sum(client.memory_usage(key) for key in keys)

        assert nbytes < 4096

    def test_round_trips_do_not_grow_with_the_batch(
        self, server: RedisServer, storage: Hf3fsStorage
    ) -> None:
        def commands(count: int) -> int:
            before = processed()
            storage.batch_exists(SPACE, HASHES[:count])
            return processed() - before

        def processed() -> int:
            with client_of(server) as client:
                return int(client.info("stats")["total_commands_processed"])

        assert commands(1) == commands(64)

    def test_a_wrong_password_is_not_repeated(self, tmp_path: Path) -> None:
        secret = "hunter2-hunter2"  # noqa: S105 - made up
        with RedisServer(tmp_path / "redis", "--requirepass", "right") as server:
            url = f"redis://:{secret}@127.0.0.1:{server.port}"
            with pytest.raises(HiCacheError) as caught:
                Hf3fsStorage.from_config({"path": str(tmp_path / "r"), "index": url})

        assert secret not in str(caught.value)
        assert [] == list((tmp_path / "r" / "writers").iterdir())

    def test_a_url_of_something_else_is_a_config_error(self, tmp_path: Path) -> None:
        for url in ("mysql://host", "redis", "sqlite3", "redis://host:port:port"):
            with pytest.raises(ConfigError, match="index"):
                Hf3fsStorage.from_config({"path": str(tmp_path), "index": url})

    @pytest.mark.parametrize(
        ("url", "named"),
        [
            ("redis://127.0.0.1:1/zero", "index: must end with a database number"),
            ("redis://127.0.0.1:1/3?db=5", "index: must end with a database number"),
            ("redis://:1/0", "index: must name a host"),
        ],
    )
    def test_a_url_that_names_no_server_or_database_is_refused(
        self, tmp_path: Path, url: str, named: str
    ) -> None:
        with pytest.raises(ConfigError, match=named):
            Hf3fsStorage.from_config({"path": str(tmp_path), "index": url})


def _reserved(storage: Hf3fsStorage, count: int) -> list[int]:
    files = storage._files_of(SPACE)
    return [place.slot for place in storage._mount.get().index.reserve(files, count, Deadline(30))]


def _works(storage: Hf3fsStorage) -> bool:
    try:
        storage.batch_exists(SPACE, HASHES[:1])
    except StorageUnavailable:
        return False
    return True


def test_the_times_of_pages_are_those_of_their_last_use(
    server: RedisServer, tmp_path: Path
) -> None:
    before_s = time.time()
    with opened(server, tmp_path, capacity_nbytes=1 << 30) as storage:
        stored(storage, range(2))
        first, absent = storage.page_times(SPACE, [hash_of(1), hash_of(9)])

    assert first.used_at_s is not None
    assert before_s - 1 <= first.used_at_s <= time.time()
    assert absent.used_at_s is None


class TestForeignEntries:
    """Entries that another program has written to the keys of an index."""

    @pytest.mark.parametrize(
        "place", ["", "x", "1 zz", f"-1 {'ab' * 24}", f"{1 << 50} {'ab' * 24}"]
    )
    def test_a_place_that_is_none_makes_the_index_unavailable(
        self, server: RedisServer, storage: Hf3fsStorage, place: str
    ) -> None:
        stored(storage, range(2))
        name = f"{index_of(storage)._prefix}:pages:{SPACE.id}"
        with client_of(server) as client:
            client.hset(name, HASHES[0], place)

        with pytest.raises(StorageUnavailable):
            storage.batch_exists(SPACE, HASHES[:1])
        with pytest.raises(StorageUnavailable):
            storage.batch_delete(SPACE, HASHES[:1])

    def test_names_that_are_no_page_hash_are_not_listed(
        self, server: RedisServer, storage: Hf3fsStorage
    ) -> None:
        stored(storage, range(2))
        name = f"{index_of(storage)._prefix}:pages:{SPACE.id}"
        foreign = (b"\xff", b"", b"abc", HASHES[0][:33].encode())
        with client_of(server) as client:
            client.hset(name, mapping=dict.fromkeys(foreign, f"1 {'ab' * 24}"))

        assert {*HASHES[:2]} == {info.page_hash for info in storage.scan(SPACE)}


# Clears and deletes of `hf3fs` with an index in Redis: leases that end, processes that stop.


@pytest.fixture
def other(server: RedisServer, tmp_path: Path, storage: Hf3fsStorage) -> Iterator[Hf3fsStorage]:
    """Yield the storage of another host on the same root."""
    with opened(server, tmp_path) as other:
        yield other


def count_hits(storage: Hf3fsStorage, numbers: range) -> int:
    return sum(hits(storage, numbers))


def perform(act: str, storage: Hf3fsStorage) -> None:
    """Clear, delete or list the stored pages."""
    if act == "clear":
        storage.clear(SPACE)
    elif act == "delete":
        storage.batch_delete(SPACE, HASHES[:32])
    else:
        list(storage.scan(SPACE))


def lost_keys(server: RedisServer, storage: Hf3fsStorage) -> None:
    """Remove the keys of the index, and allow its rebuild at once."""
    with client_of(server) as client:
        prefix = index_of(storage)._prefix
        names = [name for name in client.scan_iter(f"{prefix}*") if not name.endswith(b":state")]
        client.delete(*names)
        client.hdel(f"{prefix}:state", "made")


class TestEndsOfLeases:
    @pytest.mark.parametrize("act", ["clear", "delete"])
    def test_a_slot_whose_lease_has_ended_is_left_alone(
        self,
        storage: Hf3fsStorage,
        other: Hf3fsStorage,
        monkeypatch: pytest.MonkeyPatch,
        act: str,
    ) -> None:
        """The process that clears or deletes is delayed until another host has taken over the slots."""
        stored(storage, range(32))
        taken = {place.slot for place in _places(storage, range(32)).values()}
        name = "deallocate" if act == "clear" else "invalidate"
        real = getattr(SlotFiles, name)

        def held_up(files: SlotFiles, slots: Sequence[int], until: Deadline | None = None) -> int:
            monkeypatch.setattr(SlotFiles, name, real)

            def are_taken() -> bool:
                stored(other, range(32, 64))
                now = {place.slot for place in _places(other, range(32, 64)).values()}
                if taken <= now:
                    return True
                other.batch_delete(SPACE, HASHES[32:])
                return False

            wait_until(are_taken, limit_s=30)
            done: int = real(files, slots, until)
            return done

        index_of(storage)._lease_ms = 50
        monkeypatch.setattr(SlotFiles, name, held_up)
        with pytest.raises(StorageUnavailable, match="lease"):
            perform(act, storage)

        assert 32 == count_hits(other, range(32, 64))
        index_of(storage)._lease_ms = 60_000
        assert 32 == storage.clear(SPACE)

    def test_a_clear_renews_its_leases(
        self, storage: Hf3fsStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored(storage, range(64))
        index = index_of(storage)
        real, renewed = index._run, list[int]()

        def running(deadline: Deadline, script: str, *arguments: object, **options: Any) -> Any:
            if script == scripts.RENEW:
                renewed.append(len(arguments) - 2)
            return real(deadline, script, *arguments, **options)

        halves = iter([Deadline(0)] * 3)
        monkeypatch.setattr(index, "_renewal_deadline", lambda: next(halves, Deadline(60)))
        monkeypatch.setattr(index, "_run", running)

        assert 64 == storage.clear(SPACE)
        assert renewed
        assert 0 == count_hits(storage, range(64))
        assert 0 == storage.stats().nbytes

    def test_a_page_set_during_a_clear_is_there_afterwards(
        self, storage: Hf3fsStorage, other: Hf3fsStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored(storage, range(32))
        real = SlotFiles.deallocate

        def overtaken(files: SlotFiles, slots: Sequence[int], until: Deadline | None = None) -> int:
            monkeypatch.setattr(SlotFiles, "deallocate", real)
            stored(other, range(32, 64))
            return real(files, slots, until)

        monkeypatch.setattr(SlotFiles, "deallocate", overtaken)

        assert 32 == storage.clear(SPACE)
        assert (0, 32) == (count_hits(other, range(32)), count_hits(other, range(32, 64)))

    def test_another_clear_invalidates_the_slots_that_the_first_one_could_not(
        self, storage: Hf3fsStorage, server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing(*_: object) -> int:
            raise OSError(5, "I/O error")

        stored(storage, range(8))
        index_of(storage)._lease_ms = 1
        with monkeypatch.context() as patched:
            patched.setattr(SlotFiles, "deallocate", failing)
            with pytest.raises(StorageUnavailable):
                storage.clear(SPACE)
        index_of(storage)._lease_ms = 60_000
        with client_of(server) as client:
            leases = f"{index_of(storage)._prefix}:leases"

            def have_ended() -> bool:
                storage.batch_delete(SPACE, HASHES[20:21])
                stored(storage, range(20, 21))
                return not client.zcard(leases)

            wait_until(have_ended, limit_s=30)
        storage.clear(SPACE)
        lost_keys(server, storage)

        assert 0 == count_hits(storage, range(8))


_CLEARS = """
import sys
from hicache_backends.hf3fs import Hf3fsStorage
from hicache_backends.hf3fs.slot_files import SlotFiles
from hicache_storage import HiCacheError
from pages import space
storage = Hf3fsStorage.from_config({"path": sys.argv[1], "index": sys.argv[2], "timeout_s": 20})
storage._mount.get().index._lease_ms = int(sys.argv[3])
real = SlotFiles.deallocate

def stopped(self, slots, until=None):
    SlotFiles.deallocate = real
    print("detached", flush=True)
    sys.stdin.readline()
    return real(self, slots, until)
SlotFiles.deallocate = stopped
try:
    print("cleared", storage.clear(space()), flush=True)
except HiCacheError as error:
    print(type(error).__name__, flush=True)
"""


class TestProcesses:
    def test_the_slots_of_a_killed_clear_come_back(
        self, storage: Hf3fsStorage, server: RedisServer, tmp_path: Path
    ) -> None:
        stored(storage, range(32))
        with child(_CLEARS, tmp_path, server.url, 50) as (pid, output):
            assert "detached\n" == output.readline()
            os.kill(pid, signal.SIGKILL)
        assert 0 == count_hits(storage, range(32))

        def all_are_back() -> bool:
            storage.clear(SPACE)
            stored(storage, range(64))
            return (storage.stats().nbytes or 0) == 64 * SLOT_NBYTES

        wait_until(all_are_back, limit_s=30)
        assert 64 == count_hits(storage, range(64))

    def test_a_clear_that_was_stopped_for_longer_than_its_lease_takes_no_new_pages(
        self, storage: Hf3fsStorage, server: RedisServer, tmp_path: Path
    ) -> None:
        stored(storage, range(32))
        taken = {place.slot for place in _places(storage, range(32)).values()}
        with child(_CLEARS, tmp_path, server.url, 50) as (pid, output):
            assert "detached\n" == output.readline()
            os.kill(pid, signal.SIGSTOP)

            def are_taken() -> bool:
                stored(storage, range(32, 64))
                now = {place.slot for place in _places(storage, range(32, 64)).values()}
                if not taken <= now:
                    storage.batch_delete(SPACE, HASHES[32:])
                return taken <= now

            wait_until(are_taken, limit_s=30)
            os.kill(pid, signal.SIGCONT)
            with open(f"/proc/{pid}/fd/0", "w") as its_input:  # noqa: PTH123 - its pipe
                its_input.write("go on\n")
            assert "StorageUnavailable\n" == output.readline()

        assert 32 == count_hits(storage, range(32, 64))


class TestLostLeases:
    @pytest.mark.parametrize("act", ["clear", "delete", "scan"])
    def test_a_call_that_meets_another_index_raises(
        self,
        storage: Hf3fsStorage,
        other: Hf3fsStorage,
        server: RedisServer,
        monkeypatch: pytest.MonkeyPatch,
        act: str,
    ) -> None:
        """Otherwise half of the pages would stay, and the call would report all of them as removed."""
        stored(storage, range(32))
        epoch = index_of(storage)._epoch
        real, calls = epoch.require, list[object]()

        def lost_afterwards(deadline: Deadline) -> Any:
            trusted = real(deadline)
            calls.append(trusted)
            if len(calls) == 2:  # the call has begun, and has an identity of the index
                lost_keys(server, storage)
                count_hits(other, range(1))
            return trusted

        monkeypatch.setattr(epoch, "require", lost_afterwards)
        if act == "scan":
            calls.append("it looks at the index once less")
        with pytest.raises(HiCacheError, match=r"rebuilt|restarted"):
            perform(act, storage)
        assert 32 == count_hits(other, range(32))

    @pytest.mark.parametrize(
        "moment", [(Layout, "key_spaces"), (SlotFiles, "newest")], ids=["early", "late"]
    )
    def test_a_maker_that_was_overtaken_leaves_the_index_of_the_other(
        self,
        storage: Hf3fsStorage,
        other: Hf3fsStorage,
        server: RedisServer,
        monkeypatch: pytest.MonkeyPatch,
        moment: tuple[type[object], str],
    ) -> None:
        owner, step = moment
        stored(storage, range(8))
        lost_keys(server, storage)
        real = getattr(owner, step)
        prefix = index_of(storage)._prefix

        def overtaken(*arguments: Any, **options: Any) -> Any:
            monkeypatch.setattr(owner, step, real)
            with client_of(server) as client:
                client.delete(f"{prefix}:maker")  # as if the maker had been silent for too long
            assert 8 == count_hits(other, range(8))
            stored(other, range(8, 16))
            return real(*arguments, **options)

        monkeypatch.setattr(owner, step, overtaken)
        with pytest.raises(StorageUnavailable, match="rebuilding"):
            count_hits(storage, range(8))

        assert 16 == count_hits(storage, range(16))
        stored(storage, range(16, 64))
        assert 64 == count_hits(other, range(64))


def _places(storage: Hf3fsStorage, numbers: range) -> Any:
    files = storage._files_of(SPACE)
    with index_of(storage).view(files, Deadline(20)) as view:
        return view.find([hash_of(number) for number in numbers])


class TestTimes:
    @pytest.mark.parametrize("ahead_s", [10**8, 3600, 200])
    def test_pages_that_are_used_after_a_clock_was_set_back_stay(
        self, server: RedisServer, tmp_path: Path, ahead_s: int
    ) -> None:
        with opened(server, tmp_path, capacity_nbytes=20 * SLOT_NBYTES) as storage:
            stored(storage, range(18))
        limits = {"capacity_nbytes": 20 * SLOT_NBYTES, "low_watermark": 0.95}
        with opened(server, tmp_path, **limits) as storage, client_of(server) as client:
            lru = f"{index_of(storage)._prefix}:lru"
            for member in client.zrange(lru, 0, -1):
                client.zincrby(lru, ahead_s * 10**6, member)
            assert all(hits(storage, range(9, 18)))
            stored(storage, range(20, 29))

            assert [True] * 9 == storage.batch_exists(SPACE, HASHES[9:18])
            assert [True] * 9 == storage.batch_exists(SPACE, HASHES[20:29])
            assert [False] * 7 == storage.batch_exists(SPACE, HASHES[2:9])

    @pytest.mark.parametrize("behind_s", [-3600, 3600])
    def test_a_host_with_another_clock_uses_the_clock_of_the_server(
        self,
        server: RedisServer,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        behind_s: int,
    ) -> None:
        real_ns = time.time_ns
        limits = {"capacity_nbytes": 20 * SLOT_NBYTES, "low_watermark": 0.95}
        with opened(server, tmp_path, **limits) as storage:
            stored(storage, range(18))
            monkeypatch.setattr(time, "time_ns", lambda: real_ns() - behind_s * 10**9)
            with opened(server, tmp_path, **limits) as other:
                assert all(hits(other, range(9, 18)))
            monkeypatch.undo()
            stored(storage, range(20, 29))

            assert [True] * 9 == storage.batch_exists(SPACE, HASHES[9:18])
            assert [True] * 9 == storage.batch_exists(SPACE, HASHES[20:29])
