from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from name_servers import Names, look_ups
from servers import wait_until

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.resolver import Resolver
from hicache_storage.errors import StorageTimeout, StorageUnavailable


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    server = Names()
    monkeypatch.setattr(socket, "getaddrinfo", server.look_up)
    yield server
    server.answers.set()
    wait_until(lambda: not look_ups())


def test_a_look_up_that_hangs_ends_with_the_deadline_and_is_shared(names: Names) -> None:
    names.answers.clear()
    resolver = Resolver()
    for _ in range(5):
        with pytest.raises(StorageTimeout, match=r"look-up of host 'cache\.example'"):
            resolver.addresses("cache.example", 7, Deadline(0.01))

    assert 1 == len(look_ups())


@pytest.mark.parametrize(
    ("code", "is_kept"), [(socket.EAI_AGAIN, True), (socket.EAI_NONAME, False)]
)
def test_old_addresses_are_used_unless_the_name_is_gone(
    names: Names, code: int, *, is_kept: bool
) -> None:
    resolver = Resolver()
    expected = [(socket.AF_INET, ("127.0.0.1", 7))]
    assert expected == resolver.addresses("cache.example", 7, Deadline(10))
    names.error = socket.gaierror(code, "no")
    if is_kept:
        assert expected == resolver.addresses("cache.example", 7, Deadline(10))
    else:
        with pytest.raises(ConnectionError, match=r"'cache\.example' cannot be looked up: no"):
            resolver.addresses("cache.example", 7, Deadline(10))


def test_new_addresses_of_a_name_replace_the_old_ones(names: Names) -> None:
    resolver = Resolver()
    resolver.addresses("cache.example", 7, Deadline(10))
    names.hosts = ["127.0.0.9"]

    assert [(socket.AF_INET, ("127.0.0.9", 7))] == resolver.addresses(
        "cache.example", 7, Deadline(10)
    )


def test_an_address_is_not_looked_up(names: Names) -> None:
    names.answers.clear()
    resolver = Resolver()

    assert [(socket.AF_INET, ("127.0.0.1", 7))] == resolver.addresses("127.0.0.1", 7, Deadline(1))
    assert [(socket.AF_INET6, ("::1", 7, 0, 0))] == resolver.addresses("::1", 7, Deadline(1))


@pytest.mark.parametrize("host", ["a" * 70, "b\x00c", "..", "\udcff"])
def test_a_host_that_is_no_name_raises_no_foreign_error(host: str) -> None:
    with pytest.raises(OSError, match="looked up"):
        Resolver().addresses(host, 7, Deadline(10))


def test_a_missing_thread_ends_no_later_look_up(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolver = Resolver()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(StorageUnavailable, match="cannot start a thread"):
            resolver.addresses("cache.example", 7, Deadline(10))
    found = resolver.addresses("cache.example", 7, Deadline(10))
    monkeypatch.setattr(threading.Thread, "start", refused)

    assert found == resolver.addresses("cache.example", 7, Deadline(10))


def test_a_resolver_looks_up_again_after_a_reset(names: Names) -> None:
    names.answers.clear()
    resolver = Resolver()
    with pytest.raises(StorageTimeout):
        resolver.addresses("cache.example", 7, Deadline(0.01))
    resolver.reset()  # as a fork does in the child
    names.answers.set()

    assert resolver.addresses("cache.example", 7, Deadline(10))
