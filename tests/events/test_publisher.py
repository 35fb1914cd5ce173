from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from event_streams import Subscriber, past
from servers import free_port, wait_until

from hicache_storage.errors import ConfigError
from hicache_storage.events.messages import BlockRemoved
from hicache_storage.events.publisher import (
    DROPPED,
    SENT,
    EventPublisher,
    acquire_publisher,
    is_bound,
    offset_port,
    release_publisher,
)
from hicache_storage.events.settings import EventSettings


@pytest.fixture
def endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def replay_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def publisher(endpoint: str, replay_endpoint: str) -> Iterator[Callable[..., EventPublisher]]:
    """Return a function that opens a publisher, which the test closes at its end."""
    opened: list[EventPublisher] = []

    def open_it(rank: int | None = None, **fields: Any) -> EventPublisher:
        given = {"endpoint": endpoint, "replay_endpoint": replay_endpoint, "bind": True, **fields}
        opened.append(EventPublisher(EventSettings.parse("test", given), data_parallel_rank=rank))
        return opened[-1]

    yield open_it
    for each in opened:
        each.close()


def removed(number: int) -> list[Any]:
    return [BlockRemoved([number], "STORAGE")]


def numbers(batches: list[tuple[int, Any]]) -> list[tuple[int, int]]:
    """Return the number of each batch and the block in its event."""
    return [(number, batch[1][0]["block_hashes"][0]) for number, batch in batches]


def hold(publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold the publisher's thread at its next batch, until the event is set."""
    opened, held = threading.Event(), threading.Event()
    original = publisher._answer_replays

    def wait() -> None:
        held.set()
        assert opened.wait(20)
        original()

    monkeypatch.setattr(publisher, "_answer_replays", wait)
    assert held.wait(20)
    return opened


def test_a_subscriber_gets_each_batch_with_its_number(
    publisher: Callable[..., EventPublisher], endpoint: str
) -> None:
    opened = publisher(topic="kv", rank=None)
    with Subscriber(endpoint, topic="kv") as subscriber:
        first = subscriber.wait_until_connected(opened)

        for block in range(3):
            assert opened.publish(removed(block))

        received = [subscriber.receive() for _ in range(3)]
    assert [(first + block, block) for block in range(3)] == numbers(received)


def test_a_publisher_may_connect_to_the_subscriber(
    publisher: Callable[..., EventPublisher], endpoint: str
) -> None:
    with Subscriber(endpoint, binds=True) as subscriber:
        opened = publisher(bind=None)
        subscriber.wait_until_connected(opened)

        opened.publish(removed(7))

        assert 7 == subscriber.receive()[1][1][0]["block_hashes"][0]


def test_past_batches_are_sent_again(
    publisher: Callable[..., EventPublisher], replay_endpoint: str
) -> None:
    opened = publisher()
    for block in range(5):
        opened.publish(removed(block))
    wait_until(lambda: opened.stats()[SENT] == 5, 20)

    assert [(3, 3), (4, 4)] == numbers(past(replay_endpoint, 3))
    assert 5 == len(past(replay_endpoint))


def test_only_the_last_batches_are_sent_again(
    publisher: Callable[..., EventPublisher], replay_endpoint: str
) -> None:
    opened = publisher(buffer_steps=2)
    for block in range(5):
        opened.publish(removed(block))
    wait_until(lambda: opened.stats()[SENT] == 5, 20)

    assert [(3, 3), (4, 4)] == numbers(past(replay_endpoint))


def test_a_dropped_batch_is_counted_and_leaves_a_gap(
    publisher: Callable[..., EventPublisher],
    replay_endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = publisher(max_queue_size=2)
    release = hold(opened, monkeypatch)

    kept = [opened.publish(removed(block)) for block in range(4)]
    release.set()
    wait_until(lambda: opened.stats()[SENT] == 2, 20)
    opened.publish(removed(4))
    wait_until(lambda: opened.stats()[SENT] == 3, 20)

    assert [True, True, False, False] == kept
    assert {SENT: 3, DROPPED: 2} == opened.stats()
    assert [(0, 0), (1, 1), (4, 4)] == numbers(past(replay_endpoint))


def test_a_batch_has_the_rank_and_the_ports_are_the_ranks(
    publisher: Callable[..., EventPublisher], endpoint: str
) -> None:
    opened = publisher(rank=1, replay_endpoint="")
    with Subscriber(offset_port(endpoint, 1)) as subscriber:
        subscriber.wait_until_connected(opened)
        opened.publish(removed(1))

        assert 1 == subscriber.receive()[1][2]


def test_waiting_batches_are_sent_at_the_close(
    publisher: Callable[..., EventPublisher], endpoint: str
) -> None:
    opened = publisher()
    with Subscriber(endpoint) as subscriber:
        subscriber.wait_until_connected(opened)

        for block in range(100):
            opened.publish(removed(block))
        opened.close(20)

        assert list(range(100)) == [
            block for _, block in numbers([subscriber.receive() for _ in range(100)])
        ]


def test_a_batch_that_cannot_be_encoded_stops_nothing(
    publisher: Callable[..., EventPublisher], caplog: pytest.LogCaptureFixture
) -> None:
    opened = publisher()

    opened.publish([object()])  # type: ignore[list-item]  # no event
    opened.publish(removed(1))
    wait_until(lambda: opened.stats()[SENT] == 1, 20)

    assert "KV events could not be sent" in caplog.text


def test_a_malformed_request_of_past_batches_is_ignored(
    publisher: Callable[..., EventPublisher], replay_endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    import zmq

    opened = publisher()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(replay_endpoint)
    socket.send_multipart((b"from the start",))
    wait_until(lambda: "malformed" in caplog.text, 20)
    context.destroy(linger=0)
    opened.publish(removed(1))
    wait_until(lambda: opened.stats()[SENT] == 1, 20)

    assert 1 == len(past(replay_endpoint))


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_an_address_in_use_is_named(
    publisher: Callable[..., EventPublisher], endpoint: str, replay_endpoint: str, field: str
) -> None:
    publisher()
    other = f"tcp://127.0.0.1:{free_port()}"
    addresses = {"endpoint": endpoint, "replay_endpoint": replay_endpoint}
    free = {name: other for name in addresses if name != field}

    with pytest.raises(ConfigError, match=f"events: {field}: .*in use"):
        publisher(**free)


def test_users_of_equal_settings_share_a_publisher(endpoint: str) -> None:
    settings = [EventSettings(endpoint=endpoint, bind=True) for _ in range(2)]
    first, second = (acquire_publisher(each, None) for each in settings)

    assert first is second
    release_publisher(settings[0], None)
    assert first._thread.is_alive()
    release_publisher(settings[1], None)
    assert not first._thread.is_alive()


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///run/kv", True),
        ("tcp://10.0.0.1:5557", False),
    ],
)
def test_wildcards_are_bound_and_hosts_are_connected_to(endpoint: str, *, expected: bool) -> None:
    assert expected is is_bound(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://*:5557", "tcp://*:5559"),
        ("tcp://[::1]:5557", "tcp://[::1]:5559"),
        ("ipc:///run/kv", "ipc:///run/kv_dp2"),
    ],
)
def test_a_rank_has_an_address_of_its_own(endpoint: str, expected: str) -> None:
    assert expected == offset_port(endpoint, 2)
    assert endpoint == offset_port(endpoint, 0)


def test_a_replay_has_every_batch_that_was_published_before_the_request(
    publisher: Callable[..., EventPublisher],
    replay_endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = publisher()
    release = hold(opened, monkeypatch)

    with ThreadPoolExecutor(1) as reader:
        for block in range(3):
            opened.publish(removed(block))
        request = reader.submit(past, replay_endpoint)
        wait_until(lambda: bool(opened._replay and opened._replay.poll(0)), 20)
        release.set()

        assert [(0, 0), (1, 1), (2, 2)] == numbers(request.result(20))
