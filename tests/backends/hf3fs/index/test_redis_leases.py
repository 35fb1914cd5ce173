"""Clears and deletes of `hf3fs` with an index in Redis: leases that end, processes that stop."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from hf3fs_redis import (
    HASHES,
    SLOT_NBYTES,
    SPACE,
    client_of,
    hits,
    index_of,
    opened,
    stored,
)
from hf3fs_roots import child
from hicache_backends.hf3fs.index import redis_scripts as scripts
from hicache_backends.hf3fs.layout import Layout
from hicache_backends.hf3fs.slot_files import SlotFiles
from pages import hash_of
from servers import RedisServer, wait_until

from hicache_storage import HiCacheError, StorageUnavailable
from hicache_storage.backend_support.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hicache_backends.hf3fs import Hf3fsStorage


@pytest.fixture
def other(server: RedisServer, tmp_path: Path, storage: Hf3fsStorage) -> Iterator[Hf3fsStorage]:
    """Another host on the same root."""
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


class TestLeases:
    @pytest.mark.parametrize("act", ["clear", "delete"])
    def test_a_slot_whose_lease_has_ended_is_left_alone(
        self,
        storage: Hf3fsStorage,
        other: Hf3fsStorage,
        monkeypatch: pytest.MonkeyPatch,
        act: str,
    ) -> None:
        """The clearing process is delayed until another host has the slots."""
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


class TestLostData:
    @pytest.mark.parametrize("act", ["clear", "delete", "scan"])
    def test_a_call_that_meets_another_index_raises(
        self,
        storage: Hf3fsStorage,
        other: Hf3fsStorage,
        server: RedisServer,
        monkeypatch: pytest.MonkeyPatch,
        act: str,
    ) -> None:
        """Otherwise half of the pages would stay, and the call would report that all are gone."""
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
        with pytest.raises(HiCacheError, match=r"anew|restarted"):
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
        with pytest.raises(StorageUnavailable, match="making"):
            count_hits(storage, range(8))

        assert 16 == count_hits(storage, range(16))
        stored(storage, range(16, 64))
        assert 64 == count_hits(other, range(64))


def _places(storage: Hf3fsStorage, numbers: range) -> Any:
    files = storage._files_of(SPACE)
    with index_of(storage).view(files, Deadline(20)) as view:
        return view.find([hash_of(number) for number in numbers])
