"""Requests on the data plane: one native call for a batch, and Python for replies that are not plain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hicache_backends.s3 import S3Storage, exchange
from pages import blank, hash_of, page, space
from s3_script import Answer, ScriptedS3, error, reply, size
from servers import wait_until

from hicache_storage import native

pytestmark = pytest.mark.skipif(
    native.implementation != "compiled", reason="Python carries all requests"
)

LONG_S = 60.0
HASHES = [hash_of(number) for number in range(40)]
RIGHT = page(seed=1)
HIT = reply(200, RIGHT.tobytes())
MISS = error(404, "NoSuchKey")
ABSENT = reply(404)
"""The answer to a HEAD, which has no body."""
CHUNKED_MISS = Answer(b"HTTP/1.1 404 No\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n")
LONG_HEAD = reply(200, RIGHT.tobytes(), headers={"x": "y" * 4096})


@pytest.fixture
def server() -> Iterator[ScriptedS3]:
    with ScriptedS3() as scripted:
        yield scripted


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each native call adds its number of requests. Only replies end a call."""
    monkeypatch.setattr(exchange, "_CHECK_S", LONG_S)
    monkeypatch.setattr(exchange, "_PREPARE_S", LONG_S)
    run, counts = native.run_exchanges, list[int]()

    def counted(*arguments: Any) -> int:
        counts.append(len(arguments[1]))
        return run(*arguments)

    monkeypatch.setattr(native, "run_exchanges", counted)
    return counts


def opened(server: ScriptedS3, *answers: Answer, **fields: Any) -> S3Storage:
    storage = S3Storage.from_config(server.config(timeout_s=LONG_S, **fields))
    server.script.extend(answers)
    return storage


def got(storage: S3Storage, count: int) -> list[bytes | None]:
    targets = [blank() for _ in range(count)]
    found = storage.batch_get(space(), HASHES[:count], targets)
    return [target.tobytes() if hit else None for target, hit in zip(targets, found, strict=True)]


@pytest.mark.parametrize("fan_out", [1, 3])
def test_one_native_call_reads_a_batch(server: ScriptedS3, calls: list[int], fan_out: int) -> None:
    with opened(server, *[HIT] * 40, fan_out=fan_out) as storage:
        calls.clear()
        assert got(storage, 40) == [RIGHT.tobytes()] * 40

    assert [40] == calls


def test_one_native_call_writes_a_batch(server: ScriptedS3, calls: list[int]) -> None:
    with opened(server, *[reply(200)] * 40, fan_out=3) as storage:
        calls.clear()
        assert storage.batch_set(space(), HASHES, [RIGHT] * 40) == [True] * 40

    assert [40] == calls


def test_pages_that_are_looked_up_first_take_two_calls(
    server: ScriptedS3, calls: list[int]
) -> None:
    with opened(
        server, *[ABSENT] * 40, *[reply(200)] * 40, fan_out=3, head_first_nbytes=0
    ) as storage:
        calls.clear()
        assert storage.batch_set(space(), HASHES, [RIGHT] * 40) == [True] * 40

    assert [40, 40] == calls
    assert server.methods == ["HEAD"] * 40 + ["PUT"] * 40


@pytest.mark.parametrize("odd", [CHUNKED_MISS, LONG_HEAD], ids=["chunks", "a long head"])
def test_python_goes_on_where_a_reply_is_not_plain(
    server: ScriptedS3, calls: list[int], odd: Answer
) -> None:
    with opened(server, HIT, odd, HIT, MISS, odd, HIT) as storage:
        calls.clear()
        found = got(storage, 6)

    middle = None if odd is CHUNKED_MISS else RIGHT.tobytes()
    page_ = RIGHT.tobytes()
    assert [page_, middle, page_, None, middle, page_] == found
    assert [6, 4, 1] == calls


def test_sizes_are_read_from_heads_on_the_data_plane(server: ScriptedS3, calls: list[int]) -> None:
    absent = Answer(b"HTTP/1.1 404 No\r\ntransfer-encoding: chunked\r\n\r\n")
    with opened(server, size(4096), size(1), absent, size(4096)) as storage:
        calls.clear()
        assert storage.batch_exists(space(), HASHES[:4]) == [True, False, False, True]

    assert [4] == calls


def test_an_idle_connection_that_the_server_has_closed_is_replaced(
    server: ScriptedS3, calls: list[int]
) -> None:
    with opened(server, Answer(HIT.data, "end"), HIT) as storage:
        assert got(storage, 1) == [RIGHT.tobytes()]
        (idle,) = vars(storage)["_client"]._connections.get()._idle
        wait_until(lambda: not idle.is_idle())
        calls.clear()

        assert got(storage, 1) == [RIGHT.tobytes()]
        assert dict(storage.stats().counters) == {}
    assert [1, 1] == calls
    assert len(server.requests) == 2
