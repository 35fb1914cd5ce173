"""The deadlines of `hf3fs` calls while an index, a name server or a file system does not answer."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from clocks import ends_in
from hf3fs_roots import HASHES, NBYTES, SPACE, child, hits, opened, stored
from hicache_backends.hf3fs import Hf3fsStorage, mount
from hicache_backends.hf3fs.index import redis_client
from hicache_backends.hf3fs.slot_files import SlotFiles
from pages import page
from redis.connection import SSLConnection
from servers import RedisServer, TlsRedisServer

from hicache_storage import HiCacheError, StorageTimeout, StorageUnavailable
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.resolver import Resolver

TIMEOUT_S = 3.0
# A call whose steps each take the whole limit would take three times its limit.
LATE_S = 2.5 * TIMEOUT_S


@contextmanager
def index_held(root: Path) -> Generator[None, None, None]:
    """Hold SQLite's write lock as another process would."""
    with closing(sqlite3.connect((root / "index.sqlite").resolve(), isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("ROLLBACK")


def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make every rebuild wait at the first slot until the event is set."""
    go_on, real = threading.Event(), SlotFiles._marks

    def waiting(*arguments: Any) -> Any:
        assert go_on.wait(60)
        return real(*arguments)

    monkeypatch.setattr(SlotFiles, "_marks", waiting)
    return go_on


def damage_first_page(root: Path) -> None:
    with (root / "spaces" / SPACE.id / "slots-0000").open("r+b") as file:
        file.write(bytes(64))


class TestSqliteIndex:
    def test_all_steps_of_a_set_share_one_deadline(self, root: Path) -> None:
        """The set heals a page, writes access times and reserves slots."""
        with opened(root, timeout_s=TIMEOUT_S, capacity_nbytes="100MiB") as storage:
            stored(storage, range(2))
            hits(storage, range(1))
            damage_first_page(root)
            with index_held(root), ends_in(LATE_S), pytest.raises(StorageTimeout):
                storage.batch_set(SPACE, [HASHES[0], HASHES[10]], [page(NBYTES)] * 2)

    def test_sets_that_wait_for_one_another_each_keep_theirs(self, root: Path) -> None:
        with opened(root, timeout_s=TIMEOUT_S) as storage:
            stored(storage, range(1))

            def write(number: int) -> None:
                with suppress(StorageTimeout):
                    storage.batch_set(SPACE, HASHES[number : number + 1], [page(NBYTES)])

            threads = [threading.Thread(target=write, args=(n,)) for n in range(1, 6)]
            with index_held(root), ends_in(LATE_S):
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

    def test_a_get_does_not_wait_for_what_it_can_do_without(self, root: Path) -> None:
        limits = {"timeout_s": 60, "capacity_nbytes": "100MiB", "touch_interval_s": 0}
        with opened(root, **limits) as storage:
            stored(storage, range(2))
            damage_first_page(root)
            with index_held(root), ends_in(20):
                assert [False, True] == hits(storage, range(2))

    def test_a_process_that_was_frozen_in_a_transaction_costs_sets_and_no_gets(
        self, root: Path
    ) -> None:
        with opened(root, timeout_s=TIMEOUT_S) as storage:
            stored(storage, range(2))
            with child(_BEGINS, root) as (pid, output):
                assert "begun\n" == output.readline()
                os.kill(pid, signal.SIGSTOP)
                with ends_in(LATE_S), pytest.raises(StorageTimeout, match="locked"):
                    storage.batch_set(SPACE, HASHES[8:9], [page(NBYTES)])
                assert [True] * 2 == hits(storage, range(2))
            stored(storage, range(8, 9))

    def test_an_index_that_takes_long_to_make_is_made_past_the_deadline_of_a_call(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go_on = held_up(monkeypatch)
        with opened(root, timeout_s=TIMEOUT_S) as storage:
            stored(storage, range(4))
            for path in root.glob("index*"):
                path.unlink()
            with ends_in(LATE_S), pytest.raises(StorageTimeout, match="rebuilt"):
                hits(storage, range(4))
            go_on.set()

            assert _becomes([True] * 4, lambda: hits(storage, range(4)))

    def test_opening_waits_for_it(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with opened(root) as storage:
            stored(storage, range(4))
        for path in root.glob("index*"):
            path.unlink()
        go_on = held_up(monkeypatch)
        letting_go = threading.Timer(1.5, go_on.set)
        letting_go.start()
        with opened(root, timeout_s=1) as storage:
            assert go_on.is_set()
            assert [True] * 4 == hits(storage, range(4))
        letting_go.join()

    def test_close_ends_it(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        storage = opened(root, timeout_s=1)
        stored(storage, range(4))
        before = set(threading.enumerate())
        go_on = held_up(monkeypatch)
        for path in root.glob("index*"):
            path.unlink()
        with pytest.raises(StorageTimeout, match="rebuilt"):
            hits(storage, range(4))
        letting_go = threading.Timer(0.5, go_on.set)
        letting_go.start()
        with ends_in(10):
            storage.close()
        letting_go.join()

        assert not set(threading.enumerate()) - before

    def test_close_does_not_wait_for_the_index(self, root: Path) -> None:
        storage = opened(root, timeout_s=60, capacity_nbytes="100MiB", touch_interval_s=600)
        stored(storage, range(2))
        hits(storage, range(2))
        with index_held(root), ends_in(10):
            storage.close()

    def test_close_does_not_wait_for_a_file_system_that_hangs(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hangs, unlink = threading.Event(), os.unlink
        monkeypatch.setattr(mount, "_CLOSE_S", 0.5)
        storage = opened(root)
        writers = str(root / "writers")

        def hanging(path: Any, **options: Any) -> None:
            if str(path).startswith(writers):
                assert hangs.wait(60)
            unlink(path, **options)

        monkeypatch.setattr(os, "unlink", hanging)
        before = set(threading.enumerate())
        with ends_in(10):
            storage.close()
        hangs.set()
        for thread in threading.enumerate():
            if thread.name == "hf3fs-close":
                thread.join(60)

        assert not set(threading.enumerate()) - before
        assert [] == list((root / "writers").iterdir())


_BEGINS = """
import os, sqlite3, sys
db = sqlite3.connect(os.path.realpath(sys.argv[1] + "/index.sqlite"), isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("begun", flush=True)
sys.stdin.read()
"""


class Talker:
    """A server on loopback that sends one byte now and then, and never a whole line."""

    def __init__(self, context: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> None:
        self._listener = socket.create_server((host, 0))
        self._context = context
        self.port: int = self._listener.getsockname()[1]
        self.heard = b""
        self._ends = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._ends.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with suppress(OSError):
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True)
            with connection:
                self.heard += connection.recv(4096)
                while not self._ends.wait(0.2):
                    connection.sendall(b"+")


@pytest.fixture
def talker() -> Iterator[Talker]:
    with closing(Talker()) as talker:
        yield talker


def opened_by(url: str, root: Path, timeout_s: float = TIMEOUT_S) -> Hf3fsStorage:
    return Hf3fsStorage.from_config({"path": str(root), "index": url, "timeout_s": timeout_s})


class TestRedisIndex:
    def test_a_server_that_drips_does_not_lengthen_a_call(
        self, talker: Talker, tmp_path: Path
    ) -> None:
        with ends_in(LATE_S), pytest.raises(StorageTimeout):
            opened_by(f"redis://127.0.0.1:{talker.port}", tmp_path)

    def test_a_name_look_up_that_hangs_does_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hangs = threading.Event()

        def hanging(*_: Any, **__: Any) -> list[Any]:
            hangs.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "try again")

        monkeypatch.setattr(redis_client, "RESOLVER", Resolver())
        monkeypatch.setattr(socket, "getaddrinfo", hanging)
        try:
            for _ in range(3):
                with ends_in(LATE_S), pytest.raises(StorageTimeout):
                    opened_by("redis://meta.example:6379", tmp_path, timeout_s=1)
        finally:
            hangs.set()

    def test_calls_that_need_one_name_look_it_up_once_at_a_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While the name server is silent the calls use its last answer."""
        hangs, looked_up = threading.Event(), list[object]()
        monkeypatch.setattr(redis_client, "RESOLVER", Resolver())
        with RedisServer(tmp_path / "redis") as server:
            url = f"redis://localhost:{server.port}"
            with opened_by(url, tmp_path / "r") as storage:
                index: Any = storage._mount.get().index

                def hanging(*given: Any, **_: Any) -> list[Any]:
                    looked_up.append(given)
                    hangs.wait(60)
                    raise socket.gaierror(socket.EAI_AGAIN, "try again")

                with monkeypatch.context() as patched:
                    patched.setattr(socket, "getaddrinfo", hanging)
                    for _ in range(3):
                        index._client._pool.disconnect()
                        assert [False] == storage.batch_exists(SPACE, HASHES[:1])
                    assert 1 == len(looked_up)
                    hangs.set()

    def test_addresses_that_do_not_answer_share_the_deadline(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A full backlog behaves like a host that drops packets."""
        with closing(socket.socket()) as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            address = listener.getsockname()
            waiting = [socket.socket() for _ in range(4)]
            for each in waiting:
                each.setblocking(False)
                with suppress(BlockingIOError):
                    each.connect(address)
            found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))] * 3
            monkeypatch.setattr(redis_client, "RESOLVER", Resolver())
            monkeypatch.setattr(socket, "getaddrinfo", saying(found))
            with ends_in(LATE_S), pytest.raises(StorageTimeout):
                opened_by(f"redis://meta.example:{address[1]}", tmp_path)
            for each in waiting:
                each.close()

    def test_a_refused_address_is_not_the_last(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with RedisServer(tmp_path / "redis") as server:
            found = [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0))
                for host in ("127.0.0.9", "127.0.0.1")
            ]
            url = f"redis://meta.example:{server.port}"
            monkeypatch.setattr(redis_client, "RESOLVER", Resolver())
            monkeypatch.setattr(socket, "getaddrinfo", saying(found))
            with opened_by(url, tmp_path / "r", timeout_s=20) as storage:
                assert [False] == storage.batch_exists(SPACE, HASHES[:1])

    def test_an_index_that_takes_long_to_make_is_made_past_the_deadline_of_a_call(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with (
            RedisServer(tmp_path / "redis") as server,
            opened_by(server.url, tmp_path / "r") as storage,
        ):
            stored(storage, range(4))
            go_on = held_up(monkeypatch)
            index: Any = storage._mount.get().index
            with index._client.call(Deadline(30)) as client:
                client.hdel(f"{index._prefix}:state", "made")
            with ends_in(LATE_S), pytest.raises(StorageTimeout, match="rebuilt"):
                storage.batch_exists(SPACE, HASHES[:4])
            go_on.set()

            assert _becomes([True] * 4, lambda: storage.batch_exists(SPACE, HASHES[:4]))

    def test_close_does_not_wait_for_a_silent_server(self, tmp_path: Path) -> None:
        with RedisServer(tmp_path / "redis") as server:
            storage = Hf3fsStorage.from_config(
                {"path": str(tmp_path / "r"), "index": server.url, "capacity_nbytes": "100MiB"}
            )
            stored(storage, range(2))
            hits(storage, range(2))
            server.pause()
            try:
                with ends_in(10):
                    storage.close()
            finally:
                server.resume()

    def test_a_unix_socket_serves(self, tmp_path: Path) -> None:
        with RedisServer(tmp_path / "redis") as server:
            path = server.socket_path
            with opened_by(f"unix://{path}", tmp_path / "r", timeout_s=20) as storage:
                stored(storage, range(2))
                assert [True] * 2 == hits(storage, range(2))


class TestTls:
    def test_a_certificate_of_another_host_is_sent_no_password(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Releases 5 of redis-py do not verify the name without an option."""
        tls: Any = SSLConnection
        real: Any = tls.__init__

        def as_of_old(self: Any, **options: Any) -> None:
            real(self, **{"ssl_check_hostname": False, **options})

        monkeypatch.setattr(SSLConnection, "__init__", as_of_old)
        with TlsRedisServer(tmp_path / "redis") as server:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(server._certificate, server._key)
            with closing(Talker(context, "127.0.0.2")) as talker:
                url = f"rediss://u:hunter2@127.0.0.2:{talker.port}?ssl_ca_certs={server.authority}"
                with pytest.raises(StorageUnavailable) as caught:
                    opened_by(url, tmp_path / "r")

                assert b"" == talker.heard
                assert "hunter2" not in repr(caught.value)
                assert None is caught.value.__cause__

    def test_the_right_certificate_serves(self, tmp_path: Path) -> None:
        with TlsRedisServer(tmp_path / "redis") as server:
            user = f"{server.user}:{quote(server.password, safe='')}"
            url = f"rediss://{user}@localhost:{server.port}?ssl_ca_certs={server.authority}"
            with opened_by(url, tmp_path / "r", timeout_s=20) as storage:
                stored(storage, range(2))
                assert [True] * 2 == hits(storage, range(2))


def saying(found: list[Any]) -> Callable[..., list[Any]]:
    """Return a resolver function with the result `found`."""

    def resolved(*_: Any, **__: Any) -> list[Any]:
        return found

    return resolved


def _becomes(wanted: object, call: Callable[[], object]) -> bool:
    """Return True when `call` returns `wanted` within a limit."""
    ends_s = time.monotonic() + 30
    while time.monotonic() < ends_s:
        with suppress(HiCacheError):
            if call() == wanted:
                return True
    return False
