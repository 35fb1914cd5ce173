"""A limit on bytes per second delays what exceeds the limit, until the limit is stopped."""

from __future__ import annotations

import threading
import time

from hicache_storage.cli.operations.rate_limit import RateLimit


def test_bytes_beyond_the_limit_wait() -> None:
    limit = RateLimit(1000)
    began_s = time.monotonic()

    for _ in range(3):
        limit.wait(100)

    assert time.monotonic() - began_s >= 0.2


def test_without_a_limit_nothing_waits() -> None:
    limit = RateLimit(None)
    began_s = time.monotonic()

    for _ in range(1000):
        limit.wait(1 << 40)

    assert time.monotonic() - began_s < 5


def test_a_stop_ends_the_waits() -> None:
    limit = RateLimit(1)
    limit.wait(1 << 40)
    waiting = threading.Thread(target=limit.wait, args=(1,), daemon=True)
    waiting.start()

    limit.stop()
    waiting.join(30)

    assert not waiting.is_alive()
