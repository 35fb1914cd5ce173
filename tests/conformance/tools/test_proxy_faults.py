from __future__ import annotations

import random
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from echo import ProxiedEcho, until

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.fixture
def echo() -> Generator[ProxiedEcho]:
    with ProxiedEcho() as echo:
        yield echo


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
    [("drip", 0), ("drip", -1), ("delay", -1), ("reset_after", -1), ("truncate_after", -1)],
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
