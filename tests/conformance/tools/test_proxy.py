from __future__ import annotations

import ctypes
import errno
import random
import socket
import struct
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from echo import LIMIT_S, Client, ProxiedEcho, until
from hicache_conformance.tools.network.proxy import FaultProxy

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.fixture
def echo() -> Generator[ProxiedEcho]:
    with ProxiedEcho() as echo:
        yield echo


# --- passing through -----------------------------------------------------------------------------


def test_bytes_pass_in_both_directions(echo: ProxiedEcho) -> None:
    data = random.Random(1).randbytes(3_000_000)
    client = echo.connect()
    sender = threading.Thread(target=client.send, args=(data,))
    sender.start()

    assert data == client.receive(len(data))
    sender.join(LIMIT_S)


def test_the_end_of_a_request_passes_and_the_reply_still_comes(echo: ProxiedEcho) -> None:
    client = echo.connect()
    client.send(b"last words")
    client.socket.shutdown(socket.SHUT_WR)

    assert b"last words" == client.receive(10)
    assert "end" == client.ending()
    until(lambda: echo.server.endings == ["end"])


def test_a_reset_passes(echo: ProxiedEcho) -> None:
    client = echo.connect()
    client.echo(b"x")
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.socket.close()

    until(lambda: echo.server.endings == ["reset"])


def test_many_connections_do_not_mix(echo: ProxiedEcho) -> None:
    wrong: list[int] = []

    def talk(number: int, client: Client) -> None:
        for turn in range(30):
            data = random.Random(100 * number + turn).randbytes(500)
            if client.echo(data) != data:
                wrong.append(number)

    threads = [threading.Thread(target=talk, args=(number, echo.connect())) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)

    assert [] == wrong
    assert (12, 360) == (echo.proxy.connections, echo.proxy.turns)


def test_a_server_that_does_not_read_stops_its_client_not_the_memory(echo: ProxiedEcho) -> None:
    echo.server.may_read.clear()
    client = echo.connect()
    client.socket.settimeout(0.3)
    with pytest.raises(TimeoutError):
        client.send(bytes(64 << 20))

    assert 1 << 20 <= echo.proxy.held <= 5 << 20
    echo.server.may_read.set()


def test_a_server_may_be_named(echo: ProxiedEcho) -> None:
    with FaultProxy(("localhost", echo.server.address[1])) as proxy:
        client = Client(proxy.address)

        assert b"hello" == client.echo(b"hello")
    client.socket.close()


def test_a_client_that_stops_the_interpreter_is_served() -> None:
    # Calls of this client hold the interpreter's lock, as those of some native clients do.
    libc = ctypes.PyDLL(None)
    code = "import socket; s = socket.create_server(('127.0.0.1', 0))"
    code += "; print(s.getsockname()[1], flush=True); c = s.accept()[0]; c.sendall(c.recv(5))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        with FaultProxy(("127.0.0.1", int(server.stdout.readline()))) as proxy:
            with socket.create_connection(proxy.address) as client:
                limit = struct.pack("ll", 5, 0)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                answer, descriptor = ctypes.create_string_buffer(5), client.fileno()
                libc.send(descriptor, b"hello", 5, 0)
                libc.recv(descriptor, answer, 5, 0)

            assert b"hello" == answer.raw


def test_the_client_of_a_server_that_is_gone_is_reset(echo: ProxiedEcho) -> None:
    echo.stop_server()

    with pytest.raises(ConnectionResetError):
        echo.connect().receive(1)  # The reset may come while the client connects.


# --- counting ------------------------------------------------------------------------------------


def test_round_trips_and_bytes_are_counted(echo: ProxiedEcho) -> None:
    first, second = echo.connect(), echo.connect()
    for _ in range(3):
        first.echo(b"12345")
    second.echo(b"1234567")

    assert 2 == echo.proxy.connections
    assert 4 == echo.proxy.turns
    assert (22, 22) == (echo.proxy.bytes_up, echo.proxy.bytes_down)
    assert 0 == echo.proxy.held


def test_a_batch_is_one_round_trip_however_many_pieces_it_comes_in(echo: ProxiedEcho) -> None:
    def delivered(nbytes: int) -> bool:
        return echo.proxy.bytes_up == nbytes

    echo.server.may_read.clear()
    client = echo.connect()
    for nbytes in range(100, 600, 100):
        client.send(b"x" * 100)
        until(partial(delivered, nbytes))
    echo.server.may_read.set()
    client.receive(500)

    assert 1 == echo.proxy.turns


# --- refusing ------------------------------------------------------------------------------------


def test_refusing_resets_connections_and_accepts_none(echo: ProxiedEcho) -> None:
    client = echo.connect()
    client.echo(b"x")

    echo.proxy.refuse()

    assert "reset" == client.ending()
    with pytest.raises(ConnectionRefusedError):
        echo.connect()
    until(lambda: echo.server.endings == ["reset"])


def test_the_port_is_kept_while_refusing(echo: ProxiedEcho) -> None:
    echo.proxy.refuse()

    with socket.socket() as other, pytest.raises(OSError, match="in use") as caught:
        other.bind(echo.proxy.address)

    assert errno.EADDRINUSE == caught.value.errno


def test_the_same_port_comes_back(echo: ProxiedEcho) -> None:
    address = echo.proxy.address
    for _ in range(3):
        echo.proxy.refuse()
        echo.proxy.pass_through()

        assert b"back" == echo.connect().echo(b"back")
        assert address == echo.proxy.address


# --- closing -------------------------------------------------------------------------------------


def test_closing_leaves_no_thread_and_no_descriptor() -> None:
    ProxiedEcho().__exit__()  # The process that all proxies share has started now.
    threads, descriptors = set(threading.enumerate()), set(Path("/proc/self/fd").iterdir())
    with ProxiedEcho() as echo:
        client = echo.connect()
        client.echo(b"x")
        echo.proxy.go_silent()
        client.send(b"held")
        until(lambda: echo.proxy.held == 4)
        echo.connect()

    until(lambda: set(threading.enumerate()) == threads)
    until(lambda: set(Path("/proc/self/fd").iterdir()) == descriptors)


def test_closing_twice_is_fine_and_the_counters_stay(echo: ProxiedEcho) -> None:
    echo.connect().echo(b"x")
    echo.proxy.close()
    echo.proxy.close()

    assert (1, 1) == (echo.proxy.connections, echo.proxy.turns)
    assert (1, 1) == (echo.proxy.bytes_up, echo.proxy.bytes_down)


def test_closing_resets_connections(echo: ProxiedEcho) -> None:
    client = echo.connect()
    client.echo(b"x")
    echo.proxy.close()

    assert "reset" == client.ending()


def test_a_closed_proxy_takes_no_modes(echo: ProxiedEcho) -> None:
    echo.proxy.close()

    with pytest.raises(RuntimeError, match="closed"):
        echo.proxy.go_silent()


def test_modes_and_counters_are_for_several_threads(echo: ProxiedEcho) -> None:
    wrong: list[str] = []

    def switch() -> None:
        for _ in range(100):
            echo.proxy.delay(0.0001)
            echo.proxy.go_silent()
            echo.proxy.pass_through()

    threads = [threading.Thread(target=switch) for _ in range(3)]
    for thread in threads:
        thread.start()
    client = echo.connect()
    for number in range(50):
        data = b"%d" % number
        if client.echo(data) != data:
            wrong.append(str(number))
    for thread in threads:
        thread.join(LIMIT_S)

    assert [] == wrong
    assert 50 == echo.proxy.turns
