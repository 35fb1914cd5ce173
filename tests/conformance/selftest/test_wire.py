"""`WireStore`: how it handles faults of the network and of its server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hicache_conformance.selftest.mutants.network import KeepsBrokenConnections
from hicache_conformance.selftest.references.wire import WireServer, WireStore
from hicache_conformance.selftest.references.wire_protocol import (
    Connection,
    Deadline,
    Message,
    Operation,
)
from hicache_conformance.tools.processes.resources import (
    ProcessResources,
    remaining_after,
    wait_until,
)
from pages import blank, hash_of, page, space

from hicache_storage.errors import ConfigError, StorageClosed, StorageTimeout, StorageUnavailable

A, B = hash_of(1), hash_of(2)
LIMIT_S = 30.0
SHORT_S = 0.1


def wire_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("wire ")]


@pytest.fixture
def earlier() -> list[threading.Thread]:
    """Return the threads of the server that other tests share."""
    return wire_threads()


@pytest.fixture
def server() -> Iterator[WireServer]:
    with WireServer() as started:
        yield started


@pytest.fixture
def store(server: WireServer) -> Iterator[WireStore]:
    with opened(server) as one:
        yield one


def opened(server: WireServer, **settings: Any) -> WireStore:
    return WireStore.from_config({"url": server.url, "timeout_s": LIMIT_S, **settings})


def allow(store: WireStore, timeout_s: float) -> None:
    """Give the next calls another time limit. With a short one, a store may fail to open."""
    store._settings = store._settings.model_copy(update={"timeout_s": timeout_s})


def outcome(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run a call in a thread of its own. Return a future with its result."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 - the outcome
            results.append(type(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


# --- a server that stops, and comes back -----------------------------------------------------------


def test_a_stopped_server_is_unavailable(server: WireServer, store: WireStore) -> None:
    server.stop()

    with pytest.raises(StorageUnavailable):
        store.batch_exists(space(), [A])
    with pytest.raises(StorageUnavailable):
        opened(server)


def test_the_same_store_works_when_the_server_is_back(server: WireServer, store: WireStore) -> None:
    store.batch_set(space(), [A], [page(seed=1)])
    server.stop()
    with pytest.raises(StorageUnavailable):
        store.batch_exists(space(), [A])
    server.start()
    target = blank()

    assert [True] == store.batch_get(space(), [A], [target])
    assert page(seed=1).tobytes() == target.tobytes()


def test_the_wrong_store_keeps_its_broken_connection_also_if_another_call_times_out(
    server: WireServer,
) -> None:
    with KeepsBrokenConnections.from_config({"url": server.url, "timeout_s": LIMIT_S}) as store:
        broken, late = (store._lease(number, Deadline(LIMIT_S)) for number in (-1, -2))
        for number, connection, error in (
            (-1, broken, ConnectionResetError("reset")),
            (-2, late, TimeoutError("late")),
        ):
            try:
                raise error
            except OSError:
                store._after_failure(number, connection)

        assert store._idle == [broken]


def test_a_restart_that_no_call_has_noticed_costs_none(
    server: WireServer, store: WireStore
) -> None:
    store.batch_set(space(), [A], [page()])
    server.stop()
    server.start()

    assert [True] == store.batch_exists(space(), [A])


def test_a_server_keeps_its_port_while_it_is_stopped(server: WireServer) -> None:
    port = server.address[1]
    server.stop()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    server.start()

    assert port == server.address[1]
    opened(server).close()


def test_starting_and_stopping_twice_is_fine(server: WireServer) -> None:
    server.start()
    opened(server).close()
    server.stop()
    server.stop()


def test_a_closed_server_leaves_nothing() -> None:
    before = ProcessResources.current()
    with WireServer() as server:
        store = opened(server)
        store.batch_set(space(), [A], [page()])
    store.close()

    assert [] == remaining_after(before, LIMIT_S)


# --- a server that is silent -----------------------------------------------------------------------


def test_a_paused_server_is_a_timeout_until_it_goes_on(
    server: WireServer, store: WireStore
) -> None:
    server.pause()
    allow(store, SHORT_S)
    with pytest.raises(StorageTimeout):
        store.batch_exists(space(), [A])
    with pytest.raises(StorageTimeout):
        opened(server, timeout_s=SHORT_S)
    server.resume()
    allow(store, LIMIT_S)

    assert [False] == store.batch_exists(space(), [A])


def test_a_request_that_timed_out_may_be_done_and_its_reply_is_dropped(
    server: WireServer, store: WireStore
) -> None:
    server.pause()
    allow(store, SHORT_S)
    with pytest.raises(StorageTimeout):
        store.batch_set(space(), [A], [page()])
    server.resume()
    allow(store, LIMIT_S)

    assert wait_until(lambda: store.batch_exists(space(), [A, B]) == [True, False], LIMIT_S)


def test_requests_to_a_paused_server_are_not_done_when_it_is_stopped(
    earlier: list[threading.Thread], server: WireServer, store: WireStore
) -> None:
    server.pause()
    thread, results = outcome(lambda: store.batch_set(space(), [A], [page()]))
    assert wait_until(lambda: server.held == 1, LIMIT_S)
    server.stop()
    thread.join(LIMIT_S)

    assert [StorageUnavailable] == results
    assert earlier == wire_threads()
    server.start()
    assert [False] == store.batch_exists(space(), [A])


def test_a_deadline_that_has_passed_raises() -> None:
    with pytest.raises(TimeoutError):
        Deadline(0.0).left_s()


def test_the_time_is_for_the_call_as_a_whole(server: WireServer) -> None:
    """A server that sends a byte now and then does not prolong the call."""
    listener = socket.create_server(("127.0.0.1", 0))
    stopping = threading.Event()

    def drip() -> None:
        accepted, _ = listener.accept()
        connection = Connection(accepted)
        ping = connection.receive()
        connection.send(Message(ping.number, ping.operation))
        connection.receive()
        reply = Message(2, Operation.EXISTS, [bytes(10_000)]).packed()
        for index in range(len(reply)):
            if stopping.wait(SHORT_S / 10):
                break
            accepted.send(reply[index : index + 1])
        connection.close()

    thread = threading.Thread(target=drip)
    thread.start()
    url = f"wire://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with WireStore.from_config({"url": url, "timeout_s": LIMIT_S}) as store:
            allow(store, 5 * SHORT_S)
            began_s = time.monotonic()
            with pytest.raises(StorageTimeout):
                store.batch_exists(space(), [A])
            assert time.monotonic() - began_s < LIMIT_S
    finally:
        stopping.set()
        thread.join(LIMIT_S)
        listener.close()


# --- connections -----------------------------------------------------------------------------------


def test_calls_beyond_parallelism_wait_for_a_connection(server: WireServer) -> None:
    with opened(server, parallelism=1, timeout_s=LIMIT_S) as store:
        server.pause()
        calls = [outcome(lambda: store.batch_exists(space(), [A])) for _ in range(3)]
        assert wait_until(lambda: len(store._busy) == 1, LIMIT_S)
        server.resume()
        for thread, _ in calls:
            thread.join(LIMIT_S)

        assert [[[False]]] * 3 == [results for _, results in calls]
        assert 1 == len(store._idle)


def test_concurrent_calls_have_a_connection_each(server: WireServer, store: WireStore) -> None:
    server.pause()
    calls = [outcome(lambda: store.batch_exists(space(), [A])) for _ in range(4)]
    try:
        assert wait_until(lambda: len(store._busy) == 4, LIMIT_S)
    finally:
        server.resume()
        for thread, _ in calls:
            thread.join(LIMIT_S)
    assert [[[False]]] * 4 == [results for _, results in calls]


def test_close_ends_calls_that_wait_for_the_server(server: WireServer) -> None:
    store = opened(server, parallelism=1, timeout_s=10 * LIMIT_S)
    server.pause()
    calls = [outcome(lambda: store.batch_exists(space(), [A])) for _ in range(2)]
    assert wait_until(lambda: len(store._busy) == 1, LIMIT_S)
    store.close()
    for thread, _ in calls:
        thread.join(LIMIT_S)

    assert [[StorageClosed]] * 2 == [results for _, results in calls]
    assert ([], {}) == (store._idle, store._busy)


def test_close_ends_calls_that_wait_for_another_to_connect(
    server: WireServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_conformance.selftest.references.wire._CLOSE_LIMIT_S", SHORT_S)
    store = opened(server, parallelism=1, timeout_s=10 * LIMIT_S)
    store._busy[0] = None  # as while it connects
    thread, results = outcome(lambda: store.batch_exists(space(), [A]))
    assert wait_until(lambda: bool(store._changed._waiters), LIMIT_S)  # type: ignore[attr-defined]  # no public way
    store.close()
    thread.join(LIMIT_S)

    assert [StorageClosed] == results


def test_a_failed_call_keeps_no_connection(server: WireServer, store: WireStore) -> None:
    assert 1 == len(store._idle)
    server.pause()
    thread, _ = outcome(lambda: store.batch_exists(space(), [A]))
    assert wait_until(lambda: len(store._busy) == 1, LIMIT_S)
    server.stop()
    thread.join(LIMIT_S)

    assert ([], {}) == (store._idle, store._busy)


def test_a_reply_of_another_request_is_refused(
    store: WireStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (connection,) = store._idle
    received = connection.receive

    def earlier(deadline: Deadline) -> Message:
        reply = received(deadline)
        return Message(reply.number - 1, reply.operation, reply.parts)

    monkeypatch.setattr(connection, "receive", earlier)
    with pytest.raises(StorageUnavailable, match="another request"):
        store.batch_exists(space(), [A])
    assert [] == store._idle
    assert [False] == store.batch_exists(space(), [A])


def test_unrequested_bytes_make_a_connection_unusable() -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        here.setblocking(False)
        connection = Connection.__new__(Connection)
        connection._socket = here
        assert connection.is_quiet()
        there.send(b"x")
        assert not connection.is_quiet()


# --- requests --------------------------------------------------------------------------------------


def test_a_batch_is_one_request(store: WireStore) -> None:
    hashes = [hash_of(number) for number in range(256)]
    store.open_space(space())
    before = next(store._numbers)
    store.batch_set(space(), hashes, [page()] * 256)
    store.batch_get(space(), hashes, [blank() for _ in hashes])
    store.batch_exists(space(), hashes)
    store.batch_delete(space(), hashes)

    assert 5 == next(store._numbers) - before


def test_half_a_request_has_no_effect(server: WireServer, store: WireStore) -> None:
    manifest = json.dumps(space().manifest()).encode()
    request = Message(1, Operation.SET, [space().id.encode(), manifest, A.encode(), bytes(4096)])
    with socket.create_connection(server.address) as half:
        half.sendall(request.packed()[:-1])

    assert [False] == store.batch_exists(space(), [A])


def test_a_large_page_goes_through(store: WireStore) -> None:
    large = space(page_nbytes=8 << 20)
    sent, got = page(8 << 20, seed=1), blank(8 << 20)

    assert [True] == store.batch_set(large, [A], [sent])
    assert [True] == store.batch_get(large, [A], [got])
    assert sent.tobytes() == got.tobytes()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:1",
        "wire://127.0.0.1",
        "wire://:1",
        "wire://h:99999",
        "wire://h:x",
        "wire://h:1/path",
        "http://h:1",
        "wire://me:secret@h:1",
        f"wire://{'h' * 70}:1",
    ],
)
def test_a_url_that_is_none_is_refused_unrepeated(url: str) -> None:
    with pytest.raises(ConfigError, match="wire: url: ") as caught:
        WireStore.from_config({"url": url})
    assert "secret" not in str(caught.value)


def test_a_host_that_there_is_not_is_unavailable() -> None:
    with pytest.raises(StorageUnavailable):
        WireStore.from_config({"url": "wire://nowhere.invalid:1", "timeout_s": LIMIT_S})


def test_the_server_is_a_program_that_prints_its_port() -> None:
    command = [sys.executable, "-m", "hicache_conformance.selftest.references.wire", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            with WireStore.from_config({"url": f"wire://127.0.0.1:{port}"}) as store:
                assert [True] == store.batch_set(space(), [A], [page()])
        finally:
            process.kill()
