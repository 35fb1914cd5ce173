"""The redis backend behind a network that fails: what happens to pages in transit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hicache_backends.redis import RedisStorage
from hicache_conformance import FaultProxy
from pages import blank, hash_of, page, space
from redis_servers import config_of
from servers import RedisServer, TlsRedisServer, wait_until

from hicache_storage import StorageTimeout, StorageUnavailable
from hicache_storage.backend_support.answers import unanswered_in

NBYTES = 256 << 10
SPACE = space(page_nbytes=NBYTES)
HASHES = [hash_of(number) for number in range(8)]


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[FaultProxy]:
    with FaultProxy(("127.0.0.1", server.port)) as proxy:
        yield proxy


@pytest.fixture
def direct(server: RedisServer) -> Iterator[RedisStorage]:
    """Yield a storage that does not use the proxy."""
    with opened(server) as storage:
        yield storage


@pytest.fixture
def storage(server: RedisServer, proxy: FaultProxy) -> Iterator[RedisStorage]:
    """Yield a storage behind the proxy, with a connection that has been used."""
    with opened(server, proxy) as storage:
        storage.open_space(SPACE)
        yield storage


def opened(server: RedisServer, proxy: FaultProxy | None = None, **config: Any) -> RedisStorage:
    whole = {**config_of(server), **config}
    if proxy is not None:
        whole["url"] = whole["url"].replace(f":{server.port}", f":{proxy.address[1]}")
    return RedisStorage.from_config(whole)


def set_all(storage: RedisStorage) -> list[bool]:
    return storage.batch_set(SPACE, HASHES, [page(NBYTES, seed) for seed in range(len(HASHES))])


def get_all(storage: RedisStorage) -> tuple[list[bool], list[bytes]]:
    pages = [blank(NBYTES) for _ in HASHES]
    return storage.batch_get(SPACE, HASHES, pages), [one.tobytes() for one in pages]


class TestSet:
    @pytest.mark.parametrize("nbytes", [1500, NBYTES // 2, 3 * NBYTES, 7 * NBYTES])
    def test_a_broken_connection_leaves_true_verdicts(
        self, storage: RedisStorage, direct: RedisStorage, proxy: FaultProxy, nbytes: int
    ) -> None:
        proxy.reset_after(nbytes)

        verdicts = set_all(storage)

        assert False in verdicts
        assert verdicts == direct.batch_exists(SPACE, HASHES)
        assert storage.stats().counters["settled_afterwards"] >= verdicts.count(False)
        assert [True] * 8 == set_all(storage)

    def test_replies_that_were_lost_are_found_out(
        self, storage: RedisStorage, direct: RedisStorage, proxy: FaultProxy
    ) -> None:
        proxy.reset_after(60, direction="down")

        verdicts = set_all(storage)

        assert verdicts == direct.batch_exists(SPACE, HASHES)
        assert True in verdicts

    def test_a_silent_server_is_no_verdict(
        self, server: RedisServer, direct: RedisStorage, proxy: FaultProxy
    ) -> None:
        with opened(server, proxy, timeout_s=2) as storage:
            storage.open_space(SPACE)
            proxy.go_silent()
            with pytest.raises(StorageTimeout):
                set_all(storage)
            proxy.pass_through()

            assert set_all(storage) == direct.batch_exists(SPACE, HASHES) == [True] * 8

    def test_a_user_who_may_not_end_connections_gets_no_verdict(self, tmp_path: Path) -> None:
        """Without the right to CLIENT KILL, nothing stops the write, so False could become wrong."""
        with (
            TlsRedisServer(tmp_path) as server,
            FaultProxy(("127.0.0.1", server.port)) as proxy,
            opened(server, proxy) as storage,
        ):
            storage.open_space(SPACE)
            proxy.reset_after(NBYTES)
            with pytest.raises(StorageUnavailable):
                set_all(storage)

            assert [True] * 8 == set_all(storage)

    def test_a_paused_server_does_not_bring_back_what_was_given_up(
        self, server: RedisServer, proxy: FaultProxy, direct: RedisStorage
    ) -> None:
        """Writes in the server's buffers are reported as unknown, never as refused."""
        with opened(server, proxy, timeout_s=2) as storage:
            storage.open_space(SPACE)
            server.pause()
            with pytest.raises(StorageTimeout):
                set_all(storage)
            server.resume()
        wait_until(lambda: set_all(direct) == [True] * 8)


class TestGet:
    @pytest.mark.parametrize("nbytes", [0, 5, 1000, 3 * NBYTES + 70, 7 * NBYTES])
    @pytest.mark.parametrize("cut", ["reset", "truncate"])
    def test_a_broken_connection_is_made_again_and_asked_for_the_rest(
        self, storage: RedisStorage, direct: RedisStorage, proxy: FaultProxy, nbytes: int, cut: str
    ) -> None:
        set_all(direct)
        if cut == "reset":
            proxy.reset_after(nbytes, direction="down")
        else:
            proxy.truncate_after(nbytes)

        verdicts, data = get_all(storage)

        assert [True] * 8 == verdicts
        assert [page(NBYTES, seed).tobytes() for seed in range(8)] == data

    def test_replies_from_before_a_silence_are_not_lost(
        self, server: RedisServer, direct: RedisStorage, proxy: FaultProxy
    ) -> None:
        set_all(direct)
        with opened(server, proxy, timeout_s=2) as storage:
            proxy.drip(3 * NBYTES)
            verdicts, data = get_all(storage)

        assert verdicts[0]
        assert not verdicts[-1]
        for seed, hit in enumerate(verdicts):
            assert not hit or data[seed] == page(NBYTES, seed).tobytes()
        assert storage._counters.snapshot()["unanswered"] == verdicts.count(False)
        assert {n for n, hit in enumerate(verdicts) if not hit} == unanswered_in(verdicts)

    def test_a_server_that_went_is_unavailable(
        self, storage: RedisStorage, proxy: FaultProxy
    ) -> None:
        proxy.refuse()
        with pytest.raises(StorageUnavailable):
            get_all(storage)

    def test_late_replies_reach_nobody(
        self, server: RedisServer, direct: RedisStorage, proxy: FaultProxy
    ) -> None:
        set_all(direct)
        with opened(server, proxy, timeout_s=2, parallelism=1) as storage:
            storage.open_space(SPACE)
            proxy.go_silent("down")
            with pytest.raises(StorageTimeout):
                get_all(storage)
            proxy.pass_through()
            reverse = HASHES[::-1]
            pages = [blank(NBYTES) for _ in reverse]

            assert [True] * 8 == storage.batch_get(SPACE, reverse, pages)
            assert [page(NBYTES, seed).tobytes() for seed in range(7, -1, -1)] == [
                one.tobytes() for one in pages
            ]
