from __future__ import annotations

import ctypes
import errno
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from echo import LIMIT_S, Client, ProxiedEcho, until
from hicache_conformance.tools.network.proxy import FaultProxy


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


# --- silence -------------------------------------------------------------------------------------


def test_in_silence_what_arrives_is_held_and_delivered_late(echo: ProxiedEcho) -> None:
    client = echo.connect()
    client.echo(b"before")
    echo.proxy.go_silent()
    client.send(b"late")
    until(lambda: echo.proxy.held == 4)

    assert client.is_silent()
    assert b"before" == echo.server.received

    echo.proxy.pass_through()

    assert b"late" == client.receive(4)


def test_in_silence_connections_are_accepted(echo: ProxiedEcho) -> None:
    echo.proxy.go_silent()
    client = echo.connect()
    client.send(b"hello")
    until(lambda: (echo.proxy.connections, echo.proxy.held) == (1, 5))

    echo.proxy.pass_through()

    assert b"hello" == client.receive(5)


def test_silence_of_replies_lets_requests_take_effect(echo: ProxiedEcho) -> None:
    echo.proxy.go_silent("down")
    client = echo.connect()
    client.send(b"done")
    until(lambda: bytes(echo.server.received) == b"done" and echo.proxy.held == 4)

    assert client.is_silent()
    echo.proxy.pass_through()
    assert b"done" == client.receive(4)


def test_a_late_reply_comes_before_that_to_a_later_request(echo: ProxiedEcho) -> None:
    echo.proxy.go_silent("down")
    client = echo.connect()
    client.send(b"first ")
    until(lambda: echo.proxy.held == 6)
    echo.proxy.pass_through()
    client.send(b"second")

    assert b"first second" == client.receive(12)


def test_held_bytes_can_be_dropped(echo: ProxiedEcho) -> None:
    client = echo.connect()
    echo.proxy.go_silent()
    client.send(b"lost")
    until(lambda: echo.proxy.held == 4)

    assert 4 == echo.proxy.drop_held()

    echo.proxy.pass_through()
    assert b"next" == client.echo(b"next")
    assert b"next" == echo.server.received


def test_an_end_is_held_too(echo: ProxiedEcho) -> None:
    client = echo.connect()
    client.echo(b"x")
    echo.proxy.go_silent()
    client.send(b"late")
    until(lambda: echo.proxy.held == 4)
    client.socket.close()

    echo.proxy.pass_through()

    until(lambda: bytes(echo.server.received) == b"xlate")
    until(lambda: len(echo.server.endings) == 1)


def test_in_silence_a_client_does_not_learn_that_the_server_is_gone(echo: ProxiedEcho) -> None:
    echo.stop_server()
    echo.proxy.go_silent()
    client = echo.connect()

    assert client.is_silent()
    echo.proxy.pass_through()
    assert "reset" == client.ending()


def test_one_connection_alone_can_be_silenced(echo: ProxiedEcho) -> None:
    first, second = echo.connect(), echo.connect()
    first.echo(b"x")
    second.echo(b"x")
    echo.proxy.silence_one()
    first.send(b"stuck")
    until(lambda: echo.proxy.held == 5)

    assert b"moves" == second.echo(b"moves")
    assert first.is_silent()
    echo.proxy.pass_through()
    assert b"stuck" == first.receive(5)


# --- cuts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 10, 999_999])
def test_a_request_is_cut_after_so_many_bytes(echo: ProxiedEcho, nbytes: int) -> None:
    client = echo.connect()
    client.echo(b"before")
    echo.server.received.clear()
    echo.proxy.reset_after(nbytes, direction="up")
    with suppress(ConnectionError):
        client.send(bytes(1_000_000))

    until(lambda: echo.server.endings == ["reset"])
    assert nbytes == len(echo.server.received)
    assert 1 == echo.proxy.cuts


@pytest.mark.parametrize("nbytes", [0, 1, 10, 999])
def test_a_reply_is_cut_after_so_many_bytes(echo: ProxiedEcho, nbytes: int) -> None:
    client = echo.connect()
    client.echo(b"before")
    echo.proxy.reset_after(nbytes, direction="down")
    client.send(bytes(1000))

    assert bytes(nbytes) == client.receive(nbytes)
    assert "reset" == client.ending()
    assert 1 == echo.proxy.cuts


@pytest.mark.parametrize("nbytes", [0, 1, 10, 999])
def test_a_truncated_reply_ends_in_order(echo: ProxiedEcho, nbytes: int) -> None:
    client = echo.connect()
    client.echo(b"before")
    echo.proxy.truncate_after(nbytes)
    client.send(bytes(1000))

    assert bytes(nbytes) == client.receive(1000)
    assert "end" == client.ending()
    until(lambda: len(echo.server.endings) == 1)
    assert 1 == echo.proxy.cuts


@pytest.mark.parametrize("nbytes", [0, 10])
def test_after_so_many_bytes_of_a_request_all_is_silent(echo: ProxiedEcho, nbytes: int) -> None:
    client, other = echo.connect(), echo.connect()
    client.echo(b"before")
    echo.server.received.clear()
    echo.proxy.silence_after(nbytes)
    client.send(bytes(100))
    until(lambda: echo.proxy.held >= 100 - nbytes)
    other.send(b"x")

    assert other.is_silent()
    assert nbytes == len(echo.server.received)


def test_the_request_of_a_client_that_was_reset_is_delivered_late(echo: ProxiedEcho) -> None:
    client, other = echo.connect(), echo.connect()
    echo.proxy.deliver_late_after(1)
    client.echo(b"first")
    client.send(b"late")

    assert "reset" == client.ending()
    assert b"x" == other.echo(b"x")
    assert b"firstx" == echo.server.received
    echo.proxy.pass_through()
    until(lambda: echo.server.received.endswith(b"late"))


def test_bytes_of_all_connections_count_towards_a_cut(echo: ProxiedEcho) -> None:
    first, second = echo.connect(), echo.connect()
    echo.proxy.reset_after(10, direction="down")

    assert b"1234567" == first.echo(b"1234567")
    second.send(b"1234567")

    assert b"123" == second.receive(3)
    assert "reset" == second.ending()


@pytest.mark.parametrize("orderly", [True, False])
def test_after_a_cut_all_passes_again(echo: ProxiedEcho, *, orderly: bool) -> None:
    stays, cut = echo.connect(), echo.connect()
    stays.echo(b"x")
    if orderly:
        echo.proxy.truncate_after(3)
    else:
        echo.proxy.reset_after(3, direction="down")
    cut.send(b"12345")
    cut.receive(3)
    cut.ending()

    assert b"still here" == stays.echo(b"still here")
    assert b"new" == echo.connect().echo(b"new")
    assert 1 == echo.proxy.cuts


# --- slowness ------------------------------------------------------------------------------------


def test_a_delay_holds_for_each_direction(echo: ProxiedEcho) -> None:
    client = echo.connect()
    client.echo(b"x")
    echo.proxy.delay(0.05)
    started_s = time.monotonic()

    assert b"hello" == client.echo(b"hello")
    assert time.monotonic() - started_s >= 0.1


def test_delayed_bytes_keep_their_order(echo: ProxiedEcho) -> None:
    data = random.Random(2).randbytes(200_000)
    client = echo.connect()
    echo.proxy.delay(0.02)

    assert data == client.echo(data)


def test_drips_take_their_time(echo: ProxiedEcho) -> None:
    client = echo.connect()
    client.echo(b"x")
    echo.proxy.drip(1000)
    started_s = time.monotonic()

    assert bytes(200) == client.echo(bytes(200))
    assert time.monotonic() - started_s >= 0.15


def test_passing_through_ends_a_delay_for_what_is_on_its_way(echo: ProxiedEcho) -> None:
    client = echo.connect()
    echo.proxy.delay(3600)
    client.send(b"hello")
    until(lambda: echo.proxy.held == 5)

    echo.proxy.pass_through()

    assert b"hello" == client.receive(5)


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("drip", 0),
        ("drip", -1),
        ("delay", -1),
        ("reset_after", -1),
        ("truncate_after", -1),
        ("silence_after", -1),
        ("deliver_late_after", -1),
    ],
)
def test_impossible_values_are_refused(echo: ProxiedEcho, mode: str, value: int) -> None:
    with pytest.raises(ValueError, match=str(value)):
        getattr(echo.proxy, mode)(value)


# --- damage --------------------------------------------------------------------------------------


def test_one_bit_is_inverted_after_so_many_bytes(echo: ProxiedEcho) -> None:
    client = echo.connect()
    echo.proxy.flip_after(9)
    client.echo(b"whole")
    client.send(b"wrong")

    assert b"wron" + bytes([ord("g") ^ 16]) == client.receive(5)
    assert 1 == echo.proxy.flips
    client.echo(b"whole again")


def test_a_request_is_damaged_on_its_way_up(echo: ProxiedEcho) -> None:
    client = echo.connect()
    echo.proxy.flip_after(0, direction="up")
    client.send(b"a")

    assert bytes([ord("a") ^ 1]) == client.receive(1)
