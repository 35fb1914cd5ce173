"""The time that calls of the redis backend take when a server fails."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest
from clocks import Stopwatch, ends_in, in_time
from hicache_backends.redis import RedisSettings, RedisStorage
from hicache_backends.redis.access import Address
from hicache_backends.redis.server_pool import ServerPool
from hicache_backends.redis.session import Session
from pages import blank, hash_of, page, space
from redis_servers import RespServer, array, bulk, empty_reply, unreachable_port
from servers import wait_until

from hicache_storage import KeySpace, StorageClosed, StorageTimeout, StorageUnavailable
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline

LIMIT_S = 0.4
LATE_S = LIMIT_S + 1.0
"""The limit that the capability `bounded` sets."""
SPACE = space()
NBYTES = SPACE.stored_nbytes


def opened(server: RespServer, key_space: KeySpace = SPACE) -> RedisStorage:
    """Return a storage with the short limit that has opened a key space."""
    config = {"url": server.url, "timeout_s": LIMIT_S}
    storage = in_time(lambda: RedisStorage.from_config(config))
    in_time(lambda: storage.open_space(key_space))
    return storage


def took_s(call: Callable[[], object]) -> float:
    """Return the duration of a call that must time out or find no server, as a `Stopwatch` does."""
    watch = Stopwatch()
    with pytest.raises((StorageTimeout, StorageUnavailable)):
        call()
    return watch.so_far_s()


def calls_of(storage: RedisStorage) -> dict[str, Callable[[], object]]:
    hashes, pages = [hash_of(number) for number in range(4)], [page() for _ in range(4)]
    return {
        "open_space": lambda: storage.open_space(space(model="another")),
        "exists": lambda: storage.batch_exists(SPACE, hashes),
        "get": lambda: storage.batch_get(SPACE, hashes, [blank() for _ in hashes]),
        "set": lambda: storage.batch_set(SPACE, hashes, pages),
        "delete": lambda: storage.batch_delete(SPACE, hashes),
        "spaces": lambda: list(storage.spaces()),
        "scan": lambda: list(storage.scan(SPACE)),
        "clear": lambda: storage.clear(SPACE),
    }


CALLS = ("open_space", "exists", "get", "set", "delete", "spaces", "scan", "clear")


@contextmanager
def signals(every_s: float) -> Generator[None, None, None]:
    """Interrupt this thread's system calls periodically."""
    before = signal.signal(signal.SIGALRM, _nothing)
    signal.setitimer(signal.ITIMER_REAL, every_s, every_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _nothing(number: int, frame: object) -> None:
    """Do nothing. A signal interrupts a system call only if it has a handler."""


class Fault:
    """A fault that a test switches on. Until then the server replies as an empty one."""

    def __init__(self) -> None:
        self.reply: Callable[[list[bytes]], bytes | None] | None = None

    def answer(self, command: list[bytes]) -> bytes | None:
        return empty_reply(command) if self.reply is None else self.reply(command)


@pytest.fixture
def fault() -> Fault:
    return Fault()


@pytest.fixture
def server(fault: Fault) -> Iterator[RespServer]:
    with RespServer(fault.answer) as server:
        yield server


@pytest.fixture
def storage(server: RespServer) -> Iterator[RedisStorage]:
    with opened(server) as storage:
        yield storage


class TestSilence:
    @pytest.mark.parametrize("name", CALLS)
    def test_every_call_ends_in_time(self, storage: RedisStorage, fault: Fault, name: str) -> None:
        fault.reply = lambda _: None

        assert took_s(calls_of(storage)[name]) < LATE_S

    @pytest.mark.usefixtures("transport")
    def test_half_a_reply_is_silence(self, storage: RedisStorage, fault: Fault) -> None:
        halves = {b"GET": b"$%d\r\nhalf a page" % NBYTES, b"STRLEN": b":12", b"UNLINK": b":"}
        fault.reply = lambda command: halves.get(command[0], empty_reply(command))

        for name in ("exists", "get", "set", "delete"):
            assert took_s(calls_of(storage)[name]) < LATE_S

    @pytest.mark.usefixtures("transport")
    def test_a_page_is_not_touched_after_the_call(
        self, server: RespServer, storage: RedisStorage, fault: Fault
    ) -> None:
        late = threading.Event()
        fault.reply = lambda command: empty_reply(command) if command[0] != b"GET" else _when(late)
        one = blank()
        with pytest.raises(StorageTimeout):
            storage.batch_get(SPACE, [hash_of(1)], [one])
        late.set()
        wait_until(lambda: not any(thread.name == "late" for thread in threading.enumerate()))
        fault.reply = None

        assert [False] == in_time(lambda: storage.batch_exists(SPACE, [hash_of(1)]))
        assert blank().tobytes() == one.tobytes()


def _when(event: threading.Event) -> bytes:
    event.wait(10)
    return bulk(page().tobytes())


@pytest.mark.usefixtures("transport")
class TestDrips:
    @pytest.mark.parametrize("name", ["exists", "get", "set", "delete", "spaces", "scan"])
    def test_a_byte_now_and_then_prolongs_nothing(self, name: str) -> None:
        with Dripping() as server, opened(server) as storage:
            server.drips = True

            assert took_s(calls_of(storage)[name]) < LATE_S


class Dripping(RespServer):
    """A server that sends its reply byte by byte, and never ends it."""

    def __init__(self) -> None:
        super().__init__(empty_reply)
        self.drips = False

    def _serve(self, connection: socket.socket) -> None:
        self.answer = partial(self._dripped, connection)
        super()._serve(connection)

    def _dripped(self, connection: socket.socket, command: list[bytes]) -> bytes | None:
        if not self.drips:
            return empty_reply(command)
        connection.sendall(b"$%d\r\n" % NBYTES if command[0] == b"GET" else b"-")
        while True:
            connection.sendall(b"x")
            time.sleep(0.02)


@pytest.mark.usefixtures("transport")
class TestSignals:
    @pytest.mark.parametrize("name", ["exists", "get", "set", "delete"])
    def test_a_signal_does_not_restart_the_deadline(
        self, storage: RedisStorage, fault: Fault, name: str
    ) -> None:
        fault.reply = lambda _: None
        with signals(LIMIT_S / 20):
            assert took_s(calls_of(storage)[name]) < LATE_S

    def test_a_signal_in_the_middle_of_a_page_does_not_restart_the_deadline(
        self, storage: RedisStorage, fault: Fault
    ) -> None:
        half = b"$%d\r\n" % NBYTES + b"x" * (NBYTES // 2)
        fault.reply = lambda command: half if command[0] == b"GET" else empty_reply(command)
        with signals(LIMIT_S / 20):
            get = partial(storage.batch_get, SPACE, [hash_of(1)], [blank()])
            assert took_s(get) < LATE_S

    def test_a_signal_during_a_blocked_send_does_not_restart_the_deadline(
        self, fault: Fault
    ) -> None:
        large = space(page_nbytes=16 << 20)
        with NotReading() as server, opened(server, large) as storage, signals(LIMIT_S / 20):
            server.stops_reading.set()
            given = [page(16 << 20)]
            assert took_s(lambda: storage.batch_set(large, [hash_of(1)], given)) < LATE_S

    def test_a_signal_during_a_connect_does_not_restart_the_deadline(self) -> None:
        with unreachable_port() as port, signals(LIMIT_S / 20):
            url = f"redis://127.0.0.1:{port}"
            config = {"url": url, "timeout_s": LIMIT_S}
            assert took_s(lambda: RedisStorage.from_config(config)) < LATE_S

    def test_a_signal_during_a_handshake_does_not_restart_the_deadline(self) -> None:
        with RespServer(lambda _: None) as silent, signals(LIMIT_S / 20):
            config = {"url": f"rediss://127.0.0.1:{silent.port}", "timeout_s": LIMIT_S}
            assert took_s(lambda: RedisStorage.from_config(config)) < LATE_S


class NotReading(RespServer):
    """A server that reads no page."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.stops_reading = threading.Event()
        self._unblocked = threading.Event()

    def _answer(self, command: list[bytes]) -> bytes:
        if self.stops_reading.is_set() and command[0] == b"STRLEN":
            self.answer = self._block
        return empty_reply(command)

    def _block(self, command: list[bytes]) -> bytes | None:
        self._unblocked.wait(30)
        return None

    def __exit__(self, *exc_info: object) -> None:
        self._unblocked.set()
        super().__exit__(*exc_info)


class TestSentinels:
    def test_they_and_those_who_wait_for_them_keep_the_time_of_the_call(self) -> None:
        silent = threading.Event()

        def master_reply(command: list[bytes]) -> bytes | None:
            return None if silent.is_set() else empty_reply(command)

        def sentinel_reply(command: list[bytes]) -> bytes | None:
            if command[0] != b"SENTINEL":
                return empty_reply(command)
            fields = {b"name": b"m", b"ip": b"127.0.0.1", b"flags": b"master"}
            fields[b"port"] = b"%d" % master.port
            parts = [bulk(part) for item in fields.items() for part in item]
            return None if silent.is_set() else array(array(*parts))

        with RespServer(master_reply) as master, RespServer(sentinel_reply) as sentinel:
            config = {
                "url": "redis://ignored",
                "sentinels": [f"127.0.0.1:{sentinel.port}"],
                "sentinel_master": "m",
                "timeout_s": LIMIT_S,
            }
            with in_time(lambda: RedisStorage.from_config(config)) as storage:
                silent.set()
                storage._sessions.get().deployment.invalidate()
                lengths: list[float] = []
                ask = calls_of(storage)["exists"]
                threads = [
                    threading.Thread(target=lambda: lengths.append(took_s(ask))) for _ in range(4)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(30)

        assert 4 == len(lengths)
        assert max(lengths) < LATE_S


def test_the_capability_is_declared() -> None:
    assert RedisStorage.capabilities.bounded


class TestClose:
    def test_connections_that_are_being_made_share_its_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing wakes a thread that connects. `close` has one deadline for all servers."""
        limit_s, hosts = 1.5, [f"127.0.0.{number}" for number in range(2, 7)]
        monkeypatch.setattr("hicache_backends.redis.session._CLOSE_LIMIT_S", limit_s)
        settings = RedisSettings.parse("redis", {"url": "redis://localhost"})
        access = settings.access()
        session = Session(settings, access, access, Counters(), is_cluster=False)
        with unreachable_port(*hosts) as port:
            pools = [session.pools.at(Address(host, port)) for host in hosts]

            def use(pool: ServerPool) -> None:
                with suppress(OSError, StorageClosed), pool.acquire(Deadline(10 * limit_s)):
                    pass

            threads = [threading.Thread(target=use, args=(pool,)) for pool in pools]
            for thread in threads:
                thread.start()
            wait_until(lambda: all(pool._busy for pool in pools))
            with ends_in(3 * limit_s):
                session.close()
        for thread in threads:
            thread.join()
