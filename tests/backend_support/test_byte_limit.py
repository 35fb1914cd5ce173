"""Tests the limit on the bytes that calls use at the same time."""

from __future__ import annotations

import threading

import pytest

from hicache_storage.backend_support.byte_limit import ByteLimit


def test_a_caller_waits_for_those_before_it() -> None:
    limit = ByteLimit(100)
    assert limit.acquire(60, 0)
    assert not limit.acquire(60, 0)
    entered: list[bool] = []
    waiter = threading.Thread(target=lambda: entered.append(limit.acquire(60, 20)))
    waiter.start()

    limit.release(60)
    waiter.join(20)

    assert (entered, limit.nbytes) == ([True], 60)


def test_a_caller_of_more_than_the_limit_goes_alone() -> None:
    limit = ByteLimit(100)

    assert limit.acquire(1000, 0)
    assert not limit.acquire(1, 0)


def test_without_a_limit_the_bytes_are_counted() -> None:
    limit = ByteLimit(None)

    assert limit.acquire(1000, 0)
    assert limit.acquire(1000, 0)
    assert limit.nbytes == 2000


@pytest.mark.parametrize("waits", [False, True])
def test_no_caller_enters_after_close(waits: bool) -> None:  # noqa: FBT001 - a parameter
    limit = ByteLimit(100)
    limit.acquire(100, 0)
    if waits:
        threading.Timer(0.05, limit.close).start()
    else:
        limit.close()

    assert not limit.acquire(1, 20)
