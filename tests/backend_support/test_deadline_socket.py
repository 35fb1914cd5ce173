from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from clocks import Stopwatch
from servers import make_certificates

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.deadline_socket import DeadlineSocket, connect
from hicache_storage.errors import StorageTimeout

SOON_S = 30.0
LIMIT_S = 0.3
LATE_S = LIMIT_S + 1.0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    make_certificates(directory)
    return directory


@pytest.fixture(params=["plain", "tls"])
def pair(
    request: pytest.FixtureRequest, certificates: Path
) -> Iterator[tuple[DeadlineSocket, socket.socket]]:
    """Yield a socket under test, and its peer."""
    near, far = socket.socketpair()
    if request.param == "tls":
        near, far = encrypted(certificates, near, far)
    with near, far:
        yield DeadlineSocket(near, Deadline(SOON_S)), far


def encrypted(
    certificates: Path, near: socket.socket, far: socket.socket
) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    of_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    of_server.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    of_client = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    greeted: list[ssl.SSLSocket] = []
    greeting = threading.Thread(
        target=lambda: greeted.append(of_server.wrap_socket(far, server_side=True))
    )
    greeting.start()
    client = of_client.wrap_socket(near, server_hostname="localhost")
    greeting.join(SOON_S)
    return client, greeted[0]


@contextmanager
def each_moment(step: Callable[[], object], every_s: float) -> Generator[None]:
    """Repeat a step of the peer until the end of the block."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_s):
            step()

    repeating = threading.Thread(target=repeat)
    repeating.start()
    try:
        yield
    finally:
        ended.set()
        repeating.join(SOON_S)


def took_s(call: Callable[[], object]) -> float:
    """Return the duration of a call that must time out, as a `Stopwatch` does."""
    watch = Stopwatch()
    with pytest.raises(StorageTimeout):
        call()
    return watch.so_far_s()


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a call; return its thread, and the list that its result or exception is put into."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(call())
        except OSError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


class TestBytes:
    def test_buffers_arrive_whole(self, pair: tuple[DeadlineSocket, socket.socket]) -> None:
        sock, far = pair
        sent = [bytes([number % 256]) * (number * 37 % 5000) for number in range(1500)]
        target = [memoryview(bytearray(len(buffer))) for buffer in sent]
        sending, _ = in_thread(lambda: far.sendall(b"".join(sent)))

        assert [] == sock.receive_into([*target])
        sending.join(SOON_S)
        assert sent == [bytes(buffer) for buffer in target]

    def test_buffers_are_sent_in_order(self, pair: tuple[DeadlineSocket, socket.socket]) -> None:
        sock, far = pair
        buffers = [
            bytes([number]) * size for number, size in enumerate((7, 1 << 20, 0, 9, 1 << 15))
        ]
        wanted = b"".join(buffers)
        sending, _ = in_thread(lambda: sock.send_buffers([memoryview(one) for one in buffers]))
        received = bytearray()
        while len(received) < len(wanted):
            received += far.recv(1 << 16)
        sending.join(SOON_S)

        assert wanted == received

    def test_no_more_than_is_wanted_is_awaited(
        self, pair: tuple[DeadlineSocket, socket.socket]
    ) -> None:
        sock, far = pair
        far.sendall(b"12345")
        target = bytearray(3), bytearray(10)

        (left,) = sock.receive_into([memoryview(one) for one in target], 4)
        assert b"12345" == bytes(target[0] + target[1][:2])
        assert 8 == len(left)


class TestDeadline:
    def test_silence_ends_with_it(self, pair: tuple[DeadlineSocket, socket.socket]) -> None:
        sock, _ = pair
        sock.deadline = Deadline(LIMIT_S)

        assert took_s(lambda: sock.recv(1)) < LATE_S

    def test_drips_do_not_prolong_it(self, pair: tuple[DeadlineSocket, socket.socket]) -> None:
        sock, far = pair
        sock.deadline = Deadline(LIMIT_S)
        target = [memoryview(bytearray(1000))]

        with each_moment(lambda: far.sendall(b"$"), 0.02):
            assert took_s(lambda: sock.receive_into(target)) < LATE_S

    def test_a_peer_that_reads_little_by_little_does_not_prolong_it(
        self, pair: tuple[DeadlineSocket, socket.socket]
    ) -> None:
        sock, far = pair
        sock.deadline = Deadline(LIMIT_S)

        with each_moment(lambda: far.recv(1 << 16), LIMIT_S / 4):
            assert took_s(lambda: sock.sendall(bytes(64 << 20))) < LATE_S

    def test_after_it_nothing_is_received(self, pair: tuple[DeadlineSocket, socket.socket]) -> None:
        sock, far = pair
        far.sendall(b"late")
        sock.deadline = Deadline(0.0)

        with pytest.raises(StorageTimeout):
            sock.recv(4)

    def test_redis_py_may_look_without_waiting(
        self, pair: tuple[DeadlineSocket, socket.socket]
    ) -> None:
        sock, far = pair
        sock.settimeout(0)
        with pytest.raises((BlockingIOError, ssl.SSLWantReadError)):
            sock.recv(1)
        sock.settimeout(None)
        far.sendall(b"1")

        assert b"1" == sock.recv(1)


class TestEnds:
    def test_a_shutdown_ends_a_call_that_waits(
        self, pair: tuple[DeadlineSocket, socket.socket]
    ) -> None:
        sock, _ = pair
        waiting, ended = in_thread(lambda: sock.receive_into([memoryview(bytearray(1))]))
        sock.shut_down()
        waiting.join(SOON_S)

        assert isinstance(ended[0], OSError)
        assert not isinstance(ended[0], StorageTimeout)

    def test_a_peer_that_is_gone_is_an_error(
        self, pair: tuple[DeadlineSocket, socket.socket]
    ) -> None:
        sock, far = pair
        far.close()

        with pytest.raises(ConnectionResetError):
            sock.receive_into([memoryview(bytearray(1))])
        with pytest.raises(OSError, match=r"EOF|pipe|closed"):
            sock.sendall(bytes(1 << 20))


class TestConnect:
    def test_the_first_address_that_answers_is_taken(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            hosts = "127.0.0.2", "127.0.0.1"
            addresses: list[tuple[int, tuple[Any, ...]]] = [
                (socket.AF_INET, (host, port)) for host in hosts
            ]
            with connect(addresses, Deadline(SOON_S)) as connected:
                assert listener.getsockname() == connected.getpeername()

    def test_the_error_of_the_last_address_is_raised(self, tmp_path: Path) -> None:
        path = str(tmp_path / "absent")
        with pytest.raises(FileNotFoundError):
            connect([(socket.AF_UNIX, (path,))], Deadline(SOON_S))


class TestPrepare:
    def test_an_idle_connection_gets_the_next_deadline(
        self, pair: tuple[DeadlineSocket, socket.socket]
    ) -> None:
        sock, _ = pair
        deadline = Deadline(LIMIT_S)

        assert sock.prepare(deadline)
        assert deadline is sock.deadline

    def test_a_late_reply_is_noticed(self, pair: tuple[DeadlineSocket, socket.socket]) -> None:
        sock, far = pair
        far.sendall(b"late")

        assert not sock.prepare(Deadline(SOON_S))

    @pytest.mark.parametrize("is_closed", [False, True])
    def test_an_end_is_noticed(
        self,
        pair: tuple[DeadlineSocket, socket.socket],
        is_closed: bool,  # noqa: FBT001
    ) -> None:
        sock, far = pair
        (sock if is_closed else far).close()

        assert not sock.prepare(Deadline(SOON_S))


class TestReader:
    def test_lines_and_bytes_are_read(self, pair: tuple[DeadlineSocket, socket.socket]) -> None:
        sock, far = pair
        page = bytes(range(256)) * 1000
        sending, _ = in_thread(lambda: far.sendall(b"$256000\r\n" + page + b"\r\n+OK\r\n"))
        reader = sock.reader()

        assert b"$256000\r\n" == reader.readline()
        assert page + b"\r\n" == reader.read(len(page) + 2)
        assert b"+OK\r\n" == reader.readline()
        sending.join(SOON_S)

    def test_an_end_is_an_error_and_not_a_short_read(
        self, pair: tuple[DeadlineSocket, socket.socket]
    ) -> None:
        sock, far = pair
        far.sendall(b"half a p")
        far.close()

        with pytest.raises(ConnectionResetError):
            sock.reader().read(16)

    def test_it_keeps_the_deadline(self, pair: tuple[DeadlineSocket, socket.socket]) -> None:
        sock, _ = pair
        sock.deadline = Deadline(LIMIT_S)

        assert took_s(lambda: sock.reader().readline()) < LATE_S
