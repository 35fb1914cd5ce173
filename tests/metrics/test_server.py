from __future__ import annotations

import os
import socket
import urllib.error
import urllib.request

import pytest
from servers import free_port
from stores import HookedStorage

from hicache_storage.errors import ConfigError
from hicache_storage.metrics import CacheCollector, ViewCollector, serve
from hicache_storage.page_store import PageStore


def scraped(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - a loopback server
        return str(answer.read().decode())


def test_the_endpoint_shows_the_metrics() -> None:
    with PageStore(HookedStorage()) as store, serve(CacheCollector(store), port=0) as server:
        assert "hicache_breaker_opened_total 0.0" in scraped(server.url)


def test_the_endpoint_is_of_the_loopback_address_by_default() -> None:
    with serve(ViewCollector(), port=0) as server:
        assert f"http://127.0.0.1:{server.port}/metrics" == server.url


def test_an_ipv6_address_is_in_brackets() -> None:
    try:
        server = serve(ViewCollector(), port=0, host="::1")
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    with server:
        assert f"http://[::1]:{server.port}/metrics" == server.url
        scraped(server.url)


def test_a_closed_endpoint_frees_its_port() -> None:
    server = serve(ViewCollector(), port=0)
    server.close()
    server.close()

    with pytest.raises(urllib.error.URLError):
        scraped(server.url)
    with serve(ViewCollector(), port=server.port) as again:
        assert server.port == again.port


def test_a_port_in_use_is_an_error_that_says_what_to_do() -> None:
    with (
        serve(ViewCollector(), port=0) as server,
        pytest.raises(ConfigError, match=f"{server.port}: another process .* choose another port"),
    ):
        serve(ViewCollector(), port=server.port)


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(ConfigError, match="choose an address of this machine"):
        serve(ViewCollector(), port=free_port(), host="192.0.2.1")


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_number_that_is_no_port_is_an_error(port: int) -> None:
    with pytest.raises(ConfigError, match="from 1 to 65535"):
        serve(ViewCollector(), port=port)


def test_a_forked_child_does_not_keep_the_port() -> None:
    server = serve(ViewCollector(), port=0)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:  # it lives until the parent has tried the port
        ours.close()
        theirs.recv(1)
        os._exit(0)
    theirs.close()
    try:
        server.close()
        with serve(ViewCollector(), port=server.port) as again:
            assert server.port == again.port
    finally:
        ours.close()
        os.waitpid(child, 0)
