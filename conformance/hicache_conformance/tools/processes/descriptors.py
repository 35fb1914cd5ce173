"""Waits for a descriptor, even if its number is large."""

from __future__ import annotations

import select


def wait_readable(descriptor: int, limit_s: float) -> bool:
    """Wait until a descriptor can be read, such as a pidfd when its process has ended."""
    return _wait(descriptor, select.POLLIN, limit_s)


def wait_writable(descriptor: int, limit_s: float) -> bool:
    """Wait until a descriptor can be written, such as a socket when it is connected."""
    return _wait(descriptor, select.POLLOUT, limit_s)


def _wait(descriptor: int, events: int, limit_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(limit_s * 1000))
