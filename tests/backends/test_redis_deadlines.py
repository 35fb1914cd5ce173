"""The time that calls of the redis backend take, whatever the server and the name server do (D29)."""

from __future__ import annotations

import signal
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hicache_backends.redis import RedisStorage
from hicache_backends.redis._resolver import Resolver
from pages import blank, hash_of, page, space
from redis_servers import RespServer, array, bulk, usual
from servers import wait_until

from hicache_storage import StorageTimeout, StorageUnavailable
from hicache_storage.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

LIMIT_S = 0.4
LATE_S = LIMIT_S + 1.0
"""What the capability `bounded` allows."""
SPACE = space()
NBYTES = SPACE.stored_nbytes


def opened(server: RespServer, **config: Any) -> RedisStorage:
    return RedisStorage.from_config({"url": server.url, "timeout_s": LIMIT_S, **config})


def took_s(call: Callable[[], object]) -> float:
    """How long a call takes that must end as a time-out, or as a store that is not there."""
    began_s = time.monotonic()
    with pytest.raises((StorageTimeout, StorageUnavailable)):
        call()
    return time.monotonic() - began_s


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
    """Interrupt this thread's system calls again and again."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, every_s, every_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Fault:
    """A server that is well until something happens to it."""

    def __init__(self) -> None:
        self.happens: Callable[[list[bytes]], bytes | None] | None = None

    def answer(self, command: list[bytes]) -> bytes | None:
        return usual(command) if self.happens is None else self.happens(command)


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
        storage.open_space(SPACE)
        yield storage


class TestSilence:
    @pytest.mark.parametrize("name", CALLS)
    def test_every_call_ends_in_time(self, storage: RedisStorage, fault: Fault, name: str) -> None:
        fault.happens = lambda _: None

        assert took_s(calls_of(storage)[name]) < LATE_S

    def test_half_a_reply_is_silence(self, storage: RedisStorage, fault: Fault) -> None:
        halves = {b"GET": b"$%d\r\nhalf a page" % NBYTES, b"STRLEN": b":12", b"UNLINK": b":"}
        fault.happens = lambda command: halves.get(command[0], usual(command))

        for name in ("exists", "get", "set", "delete"):
            assert took_s(calls_of(storage)[name]) < LATE_S

    def test_a_page_is_not_touched_after_the_call(
        self, server: RespServer, storage: RedisStorage, fault: Fault
    ) -> None:
        late = threading.Event()
        fault.happens = lambda command: usual(command) if command[0] != b"GET" else _when(late)
        one = blank()
        with pytest.raises(StorageTimeout):
            storage.batch_get(SPACE, [hash_of(1)], [one])
        late.set()
        wait_until(lambda: not any(thread.name == "late" for thread in threading.enumerate()))
        fault.happens = None

        assert [False] == storage.batch_exists(SPACE, [hash_of(1)])
        assert blank().tobytes() == one.tobytes()


def _when(event: threading.Event) -> bytes:
    event.wait(10)
    return bulk(page().tobytes())


class TestDrips:
    @pytest.mark.parametrize("name", ["exists", "get", "set", "delete", "spaces", "scan"])
    def test_a_byte_now_and_then_prolongs_nothing(self, name: str) -> None:
        with Dripping() as server, opened(server) as storage:
            storage.open_space(SPACE)
            server.drips = True

            assert took_s(calls_of(storage)[name]) < LATE_S


class Dripping(RespServer):
    """It answers byte by byte, and never to the end."""

    def __init__(self) -> None:
        super().__init__(usual)
        self.drips = False

    def _serve(self, connection: socket.socket) -> None:
        self.answer = lambda command: self._dripped(connection, command)
        super()._serve(connection)

    def _dripped(self, connection: socket.socket, command: list[bytes]) -> bytes | None:
        if not self.drips:
            return usual(command)
        connection.sendall(b"$%d\r\n" % NBYTES if command[0] == b"GET" else b"-")
        while True:
            connection.sendall(b"x")
            time.sleep(0.02)


class TestSignals:
    @pytest.mark.parametrize("name", ["exists", "get", "set", "delete"])
    def test_they_do_not_begin_the_time_again(
        self, storage: RedisStorage, fault: Fault, name: str
    ) -> None:
        fault.happens = lambda _: None
        with signals(LIMIT_S / 20):
            assert took_s(calls_of(storage)[name]) < LATE_S

    def test_they_do_not_in_the_middle_of_a_page(self, storage: RedisStorage, fault: Fault) -> None:
        half = b"$%d\r\n" % NBYTES + b"x" * (NBYTES // 2)
        fault.happens = lambda command: half if command[0] == b"GET" else usual(command)
        with signals(LIMIT_S / 20):
            get = partial(storage.batch_get, SPACE, [hash_of(1)], [blank()])
            assert took_s(get) < LATE_S

    def test_they_do_not_while_nobody_reads_what_is_sent(self, fault: Fault) -> None:
        large = space(page_nbytes=16 << 20)
        with Deaf() as server, opened(server) as storage, signals(LIMIT_S / 20):
            storage.open_space(large)
            server.is_deaf.set()
            given = [page(16 << 20)]
            assert took_s(lambda: storage.batch_set(large, [hash_of(1)], given)) < LATE_S

    def test_they_do_not_while_a_connection_is_made(self) -> None:
        with hole() as port, signals(LIMIT_S / 20):
            url = f"redis://127.0.0.1:{port}"
            config = {"url": url, "timeout_s": LIMIT_S}
            assert took_s(lambda: RedisStorage.from_config(config)) < LATE_S

    def test_they_do_not_in_a_handshake(self) -> None:
        with RespServer(lambda _: None) as silent, signals(LIMIT_S / 20):
            config = {"url": f"rediss://127.0.0.1:{silent.port}", "timeout_s": LIMIT_S}
            assert took_s(lambda: RedisStorage.from_config(config)) < LATE_S


class Deaf(RespServer):
    """It reads no page."""

    def __init__(self) -> None:
        super().__init__(self._hears)
        self.is_deaf = threading.Event()
        self._ends = threading.Event()

    def _hears(self, command: list[bytes]) -> bytes:
        if self.is_deaf.is_set() and command[0] == b"STRLEN":
            self.answer = self._sleeps
        return usual(command)

    def _sleeps(self, command: list[bytes]) -> bytes | None:
        self._ends.wait(30)
        return None

    def __exit__(self, *exc_info: object) -> None:
        self._ends.set()
        super().__exit__(*exc_info)


@contextmanager
def hole(*hosts: str) -> Generator[int, None, None]:
    """A port where connections are neither made nor refused: the queue of its listener is full."""
    with ExitStack() as stack:
        port = 0
        for host in hosts or ("127.0.0.1",):
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            port = listener.getsockname()[1]
            listener.listen(0)
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex((host, port))
        yield port


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    made = Names()
    resolver = Resolver()
    monkeypatch.setattr("hicache_backends.redis._dial.RESOLVER", resolver)
    monkeypatch.setattr(socket, "getaddrinfo", made.look_up)
    yield made
    made.answers.set()
    wait_until(lambda: not look_ups())


def look_ups() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("hicache-look-up")]


class Names:
    """A name server that a test holds up."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.hosts = ["127.0.0.1"]
        self.error: OSError | None = None

    def look_up(self, host: str, *_: object, **__: object) -> list[tuple[Any, ...]]:
        self.answers.wait(60)
        if self.error is not None:
            raise self.error
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in self.hosts]


class TestNames:
    def test_a_name_server_that_hangs_takes_no_longer_than_the_call(self, names: Names) -> None:
        names.answers.clear()
        config = {"url": "redis://cache.example", "timeout_s": LIMIT_S}

        with pytest.raises(StorageTimeout, match=r"look-up of the name 'cache\.example'"):
            RedisStorage.from_config(config)
        assert took_s(lambda: RedisStorage.from_config(config)) < LATE_S

    def test_one_look_up_at_most_is_under_way_for_a_name(self, names: Names) -> None:
        names.answers.clear()
        config = {"url": "redis://cache.example", "timeout_s": 0.05}
        for _ in range(5):
            took_s(lambda: RedisStorage.from_config(config))

        assert 1 == len(look_ups())

    def test_old_addresses_are_used_while_it_hangs(
        self, names: Names, server: RespServer, fault: Fault
    ) -> None:
        url = f"redis://cache.example:{server.port}"
        with RedisStorage.from_config({"url": url, "timeout_s": 10}) as storage:
            names.answers.clear()
            fault.happens = lambda command: b"-LOADING\r\n"
            with pytest.raises(StorageUnavailable):
                storage.batch_exists(SPACE, [hash_of(1)])  # which ends all connections
            fault.happens = None

            assert [False] == storage.batch_exists(SPACE, [hash_of(1)])
            assert 1 == len(look_ups())

    @pytest.mark.parametrize(
        ("code", "is_kept"), [(socket.EAI_AGAIN, True), (socket.EAI_NONAME, False)]
    )
    def test_old_addresses_are_used_unless_the_name_is_gone(
        self, names: Names, code: int, *, is_kept: bool
    ) -> None:
        resolver = Resolver()
        expected = [(socket.AF_INET, ("127.0.0.1", 7))]
        assert expected == resolver.addresses("cache.example", 7, Deadline(10))
        names.error = socket.gaierror(code, "no")
        if is_kept:
            assert expected == resolver.addresses("cache.example", 7, Deadline(10))
        else:
            with pytest.raises(ConnectionError, match=r"'cache\.example' cannot be looked up: no"):
                resolver.addresses("cache.example", 7, Deadline(10))

    def test_a_name_that_leads_elsewhere_is_followed(self, names: Names) -> None:
        resolver = Resolver()
        resolver.addresses("cache.example", 7, Deadline(10))
        names.hosts = ["127.0.0.9"]

        assert [(socket.AF_INET, ("127.0.0.9", 7))] == resolver.addresses(
            "cache.example", 7, Deadline(10)
        )

    def test_an_address_is_not_looked_up(self, names: Names) -> None:
        names.answers.clear()
        resolver = Resolver()

        assert [(socket.AF_INET, ("127.0.0.1", 7))] == resolver.addresses(
            "127.0.0.1", 7, Deadline(1)
        )
        assert [(socket.AF_INET6, ("::1", 7, 0, 0))] == resolver.addresses("::1", 7, Deadline(1))

    @pytest.mark.parametrize("host", ["a" * 70, "b\x00c", "..", "\udcff"])
    def test_what_is_no_name_is_no_foreign_error(self, host: str) -> None:
        with pytest.raises(OSError, match="looked up"):
            Resolver().addresses(host, 7, Deadline(10))

    def test_a_child_looks_up_for_itself(self, names: Names) -> None:
        names.answers.clear()
        resolver = Resolver()
        with pytest.raises(StorageTimeout):
            resolver.addresses("cache.example", 7, Deadline(0.01))
        resolver.reset()  # what a fork does in the child
        names.answers.set()

        assert resolver.addresses("cache.example", 7, Deadline(10))


class TestAddresses:
    def test_all_of_a_name_share_the_time_of_the_call(self, names: Names) -> None:
        names.hosts = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
        with hole(*names.hosts) as port:
            config = {"url": f"redis://cache.example:{port}", "timeout_s": LIMIT_S}

            with pytest.raises(StorageTimeout, match="connecting to cache"):
                RedisStorage.from_config(config)
            assert took_s(lambda: RedisStorage.from_config(config)) < LATE_S

    def test_one_that_does_not_answer_leaves_time_for_the_next(
        self, names: Names, server: RespServer
    ) -> None:
        names.hosts = ["127.0.0.2", "127.0.0.1"]
        with ExitStack() as stack:
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.2", server.port))
            taken.listen(0)
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.2", server.port))
            url = f"redis://cache.example:{server.port}"
            with RedisStorage.from_config({"url": url, "timeout_s": 4}) as storage:
                assert [False] == storage.batch_exists(SPACE, [hash_of(1)])


class TestSentinels:
    def test_they_and_those_who_wait_for_them_keep_the_time_of_the_call(self) -> None:
        silent = threading.Event()

        def master_says(command: list[bytes]) -> bytes | None:
            return None if silent.is_set() else usual(command)

        def sentinel_says(command: list[bytes]) -> bytes | None:
            if command[0] != b"SENTINEL":
                return usual(command)
            fields = {b"name": b"m", b"ip": b"127.0.0.1", b"flags": b"master"}
            fields[b"port"] = b"%d" % master.port
            told = [bulk(part) for item in fields.items() for part in item]
            return None if silent.is_set() else array(array(*told))

        with RespServer(master_says) as master, RespServer(sentinel_says) as sentinel:
            config = {
                "url": "redis://ignored",
                "sentinels": [f"127.0.0.1:{sentinel.port}"],
                "sentinel_master": "m",
                "timeout_s": LIMIT_S,
            }
            with RedisStorage.from_config(config) as storage:
                silent.set()
                storage._sessions.get()._topology.doubt()
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
