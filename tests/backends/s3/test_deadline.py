"""`bounded`: every call ends within `timeout_s` plus a second, and touches no page afterwards."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from clocks import Stopwatch, in_time
from hicache_backends.s3 import S3Storage
from hicache_backends.s3 import addresses as addresses_module
from hicache_backends.s3.addresses import Addresses
from hicache_backends.s3.connections import Connection, Request
from pages import blank, hash_of, page, space
from s3_kit import name_of
from s3_script import SILENCE, SLOW_S, Answer, ScriptedS3, listing, reply, size
from servers import wait_until

from hicache_storage.backend_support.single_flight import SingleFlight
from hicache_storage.errors import HiCacheError, StorageClosed, StorageTimeout

TIMEOUT_S = 1.0
LIMIT_S = 30.0
HASHES = [hash_of(number) for number in range(20)]
DATA = page(seed=1).tobytes()

CALLS: dict[str, Callable[[S3Storage], object]] = {
    "open_space": lambda store: store.open_space(space()),
    "exists": lambda store: store.batch_exists(space(), HASHES),
    "get": lambda store: store.batch_get(space(), HASHES, [blank() for _ in HASHES]),
    "set": lambda store: store.batch_set(space(), HASHES, [page() for _ in HASHES]),
    "delete": lambda store: store.batch_delete(space(), HASHES),
    "scan": lambda store: list(store.scan(space())),
    "spaces": lambda store: list(store.spaces()),
    "clear": lambda store: store.clear(space()),
}
_PAGE = reply(200, DATA).data
_LISTING = listing(*[name_of(space(), one) for one in HASHES], nbytes=len(DATA)).data
BEHAVIOURS = {
    "silent": SILENCE,
    "drips a page": Answer(_PAGE, "drip"),
    "drips a head for ever": Answer(b"HTTP/1.1 200 OK\r\nx", "drip"),
    "drips interim replies": Answer(b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000, "drip"),
    "drips a listing": Answer(_LISTING, "drip"),
    "answers half a head": Answer(_PAGE[:20], "hold"),
    "answers half a page": Answer(_PAGE[:-100], "hold"),
    "answers half a listing": Answer(_LISTING[:-100], "hold"),
    "sends chunks without end": Answer(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n\n\r\n", "hold"
    ),
}


@pytest.fixture
def server() -> Iterator[ScriptedS3]:
    with ScriptedS3() as scripted:
        yield scripted


def opening(server: ScriptedS3, **fields: Any) -> S3Storage:
    config = server.config(fan_out=8)
    return S3Storage.from_config({**config, "timeout_s": TIMEOUT_S, **fields})


def opened(server: ScriptedS3, **fields: Any) -> S3Storage:
    return in_time(lambda: opening(server, **fields))


def outcome(call: Callable[[], object]) -> tuple[float, str]:
    """Return the duration of `call` without waits for a processor, and the name of its exception."""
    watch, raised = Stopwatch(), ""
    try:
        call()
    except HiCacheError as error:
        raised = type(error).__name__
    return watch.so_far_s(), raised


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("habit", BEHAVIOURS)
def test_a_server_that_does_not_end_its_answers_makes_no_call_late(
    server: ScriptedS3, habit: str
) -> None:
    with opened(server) as store, ThreadPoolExecutor(len(CALLS)) as pool:
        server.of_bucket = BEHAVIOURS[habit]
        server.script.extend([BEHAVIOURS[habit]] * 1000)
        running = {name: pool.submit(outcome, partial(call, store)) for name, call in CALLS.items()}
        outcomes = {name: one.result() for name, one in running.items()}
    assert max(took_s for took_s, _ in outcomes.values()) < TIMEOUT_S + 1, outcomes
    if habit == "silent":
        assert {raised for _, raised in outcomes.values()} == {"StorageTimeout"}


@pytest.mark.parametrize("habit", BEHAVIOURS)
def test_opening_ends_in_time_whatever_the_server_does(server: ScriptedS3, habit: str) -> None:
    server.of_bucket = BEHAVIOURS[habit]
    took_s, _ = outcome(lambda: opening(server).close())
    assert took_s < TIMEOUT_S + 5  # botocore reads its own data first, which takes processor time


@pytest.mark.usefixtures("transport")
def test_the_steps_of_a_call_share_its_time(server: ScriptedS3) -> None:
    """`open_space` reads the manifest, which is slow here, then writes it, which gets no answer here."""
    timeout_s = SLOW_S + 0.2
    with opened(server, timeout_s=timeout_s, stall_timeout_s=timeout_s) as store:
        server.script.extend([Answer(reply(404).data, "slow"), SILENCE])
        took_s, raised = outcome(lambda: store.open_space(space()))
    assert raised == "StorageTimeout"
    assert took_s < timeout_s + 1


@pytest.mark.usefixtures("transport")
def test_no_page_is_touched_after_a_call_that_was_late(server: ScriptedS3) -> None:
    """The rest of each page arrives after the end of the call, when nothing receives it."""
    with opened(server, max_attempts=1) as store:
        server.script.extend([Answer(_PAGE[:-100], "later")] * len(HASHES))
        server.rest = _PAGE[-100:]
        targets = [blank() for _ in HASHES]
        with pytest.raises(StorageTimeout):
            store.batch_get(space(), HASHES, targets)
        before = [target.tobytes() for target in targets]
        server.release_rest.set()
        wait_until(lambda: server.rest_count >= 8)

        assert before == [target.tobytes() for target in targets]
        server.script.clear()
        # A busy server may take up requests of the late call only now.
        server.script.extend([reply(200, DATA)] * (len(HASHES) + 1))
        assert store.batch_get(space(), HASHES[:1], targets[:1]) == [True]


class TestNames:
    """A name server that hangs."""

    @pytest.fixture
    def names(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
        """Yield the event that must be set before the name `s3.test` can be resolved."""
        answers = threading.Event()
        answers.set()
        resolve = socket.getaddrinfo

        def resolved(host: Any, *arguments: Any, **options: Any) -> Any:
            if host == "s3.test":
                answers.wait(LIMIT_S)
                host = "127.0.0.1"
            return resolve(host, *arguments, **options)

        monkeypatch.setattr(socket, "getaddrinfo", resolved)
        monkeypatch.setattr(addresses_module, "_KEPT_S", 0.0)
        yield answers
        answers.set()

    def config(self, server: ScriptedS3) -> dict[str, Any]:
        url = f"http://s3.test:{server.port}"
        return server.config(timeout_s=TIMEOUT_S, endpoint_url=url, addressing_style="path")

    def test_an_address_that_is_out_of_date_is_served_meanwhile(
        self, server: ScriptedS3, names: threading.Event
    ) -> None:
        with S3Storage.from_config(self.config(server)) as store:
            names.clear()
            found = size(4096).data.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
            server.script.extend([Answer(found, "end")] * 20)
            for _ in range(5):
                assert store.batch_exists(space(), HASHES[:4]) == [True] * 4
            assert len([one for one in threading.enumerate() if "lookup" in one.name]) == 1

    def test_a_host_that_was_never_known_is_a_timeout(
        self, server: ScriptedS3, names: threading.Event
    ) -> None:
        names.clear()
        with pytest.raises(StorageTimeout, match=r"s3\.test was not resolved in time"):
            S3Storage.from_config(self.config(server))

    def test_closing_ends_a_call_that_waits_for_an_address(
        self, server: ScriptedS3, names: threading.Event
    ) -> None:
        raised: list[BaseException] = []
        config = {**self.config(server), "timeout_s": LIMIT_S}
        with S3Storage.from_config(config) as store:
            connections = vars(store)["_client"]._connections.get()
            connections._addresses._known = []
            while (idle := connections.take_idle()) is not None:
                idle.close()
            names.clear()

            def call() -> None:
                try:
                    store.batch_exists(space(), HASHES)
                except StorageClosed as closed:
                    raised.append(closed)

            thread = threading.Thread(target=call)
            thread.start()
            wait_until(lambda: any("lookup" in one.name for one in threading.enumerate()))
            store.close()
            thread.join(LIMIT_S)
        assert len(raised) == 1

    def test_a_lookup_that_ended_without_an_address_is_not_one(self) -> None:
        addresses = Addresses("localhost", 80)
        addresses._lookup = SingleFlight("lookup", lambda: None)

        assert not addresses.wait_until_known(LIMIT_S)

    def test_a_lookup_that_fails_keeps_the_old_address(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(addresses_module, "_KEPT_S", 0.0)
        addresses = Addresses("localhost", 80)
        assert addresses.wait_until_known(LIMIT_S)
        known = addresses.next()

        def fail(*_: object, **__: object) -> None:
            raise socket.gaierror(socket.EAI_AGAIN, "temporary failure")

        monkeypatch.setattr(socket, "getaddrinfo", fail)
        addresses.report_failure(known)

        assert addresses.wait_until_known(LIMIT_S)
        assert addresses.next().sockaddr[1] == 80

    def test_addresses_that_have_all_failed_are_looked_up_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = [(socket.AF_INET, 0, 0, "", ("127.0.0.1", 80))]

        def resolved(*_: Any, **__: Any) -> list[Any]:
            return list(found)

        monkeypatch.setattr(socket, "getaddrinfo", resolved)
        monkeypatch.setattr(addresses_module, "_RETRY_S", 0.0)
        addresses = Addresses("moved.test", 80)
        assert addresses.wait_until_known(LIMIT_S)
        found[:] = [(socket.AF_INET, 0, 0, "", ("127.0.0.2", 80))]

        addresses.report_failure(addresses.next())

        wait_until(lambda: addresses.next().sockaddr == ("127.0.0.2", 80))


def test_a_fast_peer_does_not_keep_a_turn_for_itself() -> None:
    """`handle_events` returns after some megabytes, so that the deadline is checked in time."""
    target = bytearray(64 << 20)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = addresses_module.Address(socket.AF_INET, listener.getsockname())
        connection = Connection(address, None, "localhost")
        peer, _ = listener.accept()
        wait_until(lambda: connection.handle_events(4) is None and connection.is_connected)
        connection.begin(Request(head=b"GET", into=[memoryview(target)], into_nbytes=len(target)))
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(target)
        sender = threading.Thread(target=peer.sendall, args=(head + bytes([7]) * len(target),))
        sender.start()
        turns = 0
        done: Any = None
        while done is None:
            done = connection.handle_events(1)
            turns += 1
        sender.join(LIMIT_S)
        connection.close()
        peer.close()
    assert turns >= 64 // 4
    assert done.is_page_filled
