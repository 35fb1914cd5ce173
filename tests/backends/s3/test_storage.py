"""`s3` on real servers: facts that the kit does not check."""

from __future__ import annotations

import os
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.credentials import RefreshableCredentials
from clocks import ends_in
from hicache_backends.s3 import S3Storage, connections
from hicache_backends.s3.credentials import CredentialCache
from hicache_conformance import FaultProxy
from pages import blank, hash_of, page, space
from s3_kit import BUCKET, config_of, name_of, plain_client
from servers import Ministack, Rclone, S3Server, TlsRclone, wait_until

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import ConfigError, StorageClosed, StorageTimeout, StorageUnavailable
from hicache_storage.page import Page
from hicache_storage.storage import Diagnosis

HASHES = [hash_of(number) for number in range(40)]


@pytest.fixture(scope="module")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ministack]:
    with Ministack(tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rclone]:
    with Rclone(tmp_path_factory.mktemp("rclone")) as server:
        with S3Storage.from_config(config_of(server)):
            pass
        yield server


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    name: str = request.node.name
    return name.replace("[", "-").replace("]", "")


def opened(server: S3Server, prefix: str, **fields: Any) -> S3Storage:
    """Return a store with the usual key space open."""
    storage = S3Storage.from_config(config_of(server, prefix, **fields))
    storage.open_space(space())
    return storage


def round_trip(storage: S3Storage) -> bool:
    """Return True if a page can be set and read back."""
    storage.open_space(space())
    target = blank()
    return (
        storage.batch_set(space(), HASHES[:1], [page(seed=7)]) == [True]
        and storage.batch_get(space(), HASHES[:1], [target]) == [True]
        and target.tobytes() == page(seed=7).tobytes()
    )


class TestBucket:
    def test_a_missing_one_is_a_config_error_that_says_what_to_do(self, rclone: Rclone) -> None:
        config = config_of(rclone, bucket="missing", create_bucket=False)

        with pytest.raises(ConfigError, match="missing is not there: create it, or set create_bu"):
            S3Storage.from_config(config)

    def test_it_is_made_on_demand(self, ministack: Ministack) -> None:
        for _ in range(2):
            with S3Storage.from_config(config_of(ministack, bucket="made-on-demand")) as storage:
                assert round_trip(storage)

    def test_the_server_is_named(self, ministack: Ministack) -> None:
        with plain_client(ministack) as client:
            headers = client.list_buckets()["ResponseMetadata"]["HTTPHeaders"]

        with S3Storage.from_config(config_of(ministack)) as storage:
            assert [Diagnosis("server", headers["server"])] == storage.diagnose()

    def test_a_wrong_key_is_a_config_error(self, rclone: Rclone) -> None:
        wrong = "wrong-secret"
        config = config_of(rclone, secret_access_key=wrong)

        with pytest.raises(ConfigError, match=r"denies access .403.") as raised:
            S3Storage.from_config(config)
        assert "wrong-secret" not in str(raised.value)

    def test_anonymous_where_that_is_not_allowed_names_the_field(self, rclone: Rclone) -> None:
        config = config_of(rclone, anonymous=True)
        del config["access_key_id"], config["secret_access_key"]

        with pytest.raises(ConfigError, match="anonymous: bucket pages does not answer requests"):
            S3Storage.from_config(config)

    def test_an_unknown_host_is_unavailable(self, rclone: Rclone) -> None:
        config = config_of(rclone, endpoint_url="http://no-such-host.invalid:9000")

        with pytest.raises((StorageUnavailable, StorageTimeout), match=r"no-such-host\.invalid"):
            S3Storage.from_config(config)

    def test_a_host_name_is_resolved(self, rclone: Rclone, prefix: str) -> None:
        url = rclone.endpoint_url.replace("127.0.0.1", "localhost")
        with opened(rclone, prefix, endpoint_url=url, addressing_style="path") as storage:
            assert round_trip(storage)

    def test_foreign_objects_stay(self, ministack: Ministack, prefix: str) -> None:
        others = [
            f"{prefix}/readme",
            f"{prefix}/{space().id}/readme",
            f"{prefix}/{space().id}/00/{HASHES[0]}.bak",
            f"{prefix}/spaces/readme",
        ]
        with opened(ministack, prefix) as storage, plain_client(ministack) as client:
            for name in others:
                client.put_object(Bucket=BUCKET, Key=name, Body=b"mine")
            storage.batch_set(space(), HASHES, [page()] * len(HASHES))

            assert [space()] == list(storage.spaces())
            assert set(HASHES) == {info.page_hash for info in storage.scan(space())}
            assert len(HASHES) == storage.clear(space())
            left = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", [])
            assert {*others, f"{prefix}/spaces/{space().id}.json"} == {
                found.get("Key") for found in left
            }


class TestCredentials:
    """Credentials against rclone's server, which checks signatures."""

    def without_keys(self, rclone: Rclone, prefix: str, **fields: Any) -> dict[str, Any]:
        config = config_of(rclone, prefix, **fields)
        del config["access_key_id"], config["secret_access_key"]
        return config

    def test_they_come_from_the_environment(
        self, rclone: Rclone, prefix: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", rclone.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", rclone.secret_key)

        with S3Storage.from_config(self.without_keys(rclone, prefix)) as storage:
            assert round_trip(storage)

    def test_they_come_from_a_file(self, rclone: Rclone, prefix: str, tmp_path: Path) -> None:
        file = tmp_path / "credentials"
        file.write_text(
            f"[kv]\naws_access_key_id = {rclone.access_key}\n"
            f"aws_secret_access_key = {rclone.secret_key}\n"
        )
        config = self.without_keys(rclone, prefix, credentials_file=str(file), profile="kv")

        with S3Storage.from_config(config) as storage:
            assert round_trip(storage)

    def test_payloads_are_signed_too(self, rclone: Rclone, prefix: str) -> None:
        with opened(rclone, prefix, sign_payload=True) as storage:
            assert round_trip(storage)

    def test_they_are_renewed_in_time(self) -> None:
        renewed: list[int] = []

        def renew() -> dict[str, str]:
            renewed.append(1)
            expiry = datetime.now(UTC) + timedelta(hours=1)
            return {
                "access_key": f"AKID{len(renewed)}",
                "secret_key": "sesame",
                "token": "sesame",
                "expiry_time": expiry.isoformat(),
            }

        old = {**renew(), "expiry_time": (datetime.now(UTC) + timedelta(minutes=1)).isoformat()}
        credentials: Any = RefreshableCredentials
        found = credentials.create_from_metadata(old, renew, "tests")
        cache = CredentialCache(lambda: found)

        cache.refresh(Deadline(10))

        assert cache.keys is not None
        assert cache.keys.access_key == "AKID2"

    def test_calls_do_not_wait_for_a_renewal_by_another_call(self) -> None:
        done = threading.Event()

        def renew() -> dict[str, str]:
            done.wait(20)
            raise OSError

        soon = (datetime.now(UTC) + timedelta(minutes=1)).isoformat()
        old = {"access_key": "a", "secret_key": "b", "token": "c", "expiry_time": soon}
        credentials: Any = RefreshableCredentials
        found = credentials.create_from_metadata(old, renew, "tests")
        cache = CredentialCache(lambda: found)

        with pytest.raises(StorageTimeout, match="not renewed in time"):
            cache.refresh(Deadline(0.1))
        done.set()

    def test_old_ones_are_used_until_they_expire(self) -> None:
        done = threading.Event()

        def renew() -> dict[str, str]:
            done.wait(20)
            raise OSError

        later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        old = {"access_key": "a", "secret_key": "b", "token": "c", "expiry_time": later}
        credentials: Any = RefreshableCredentials
        refreshable = credentials.create_from_metadata(old, renew, "tests")
        cache = CredentialCache(lambda: refreshable)
        cache.refresh(Deadline(10))
        refreshable._expiry_time = datetime.now(UTC) + timedelta(minutes=5)

        cache.refresh(Deadline(0.1))

        assert cache.keys is not None
        assert cache.keys.access_key == "a"
        done.set()


class TestTls:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsRclone]:
        with TlsRclone(tmp_path_factory.mktemp("tls")) as server:
            yield server

    def test_pages_travel_both_ways(self, server: TlsRclone, prefix: str) -> None:
        big = space(page_nbytes=3 << 20)
        source = Page(bytearray(os.urandom(1 << 20)), bytearray(os.urandom(2 << 20)))
        target = Page(bytearray(1), bytearray((3 << 20) - 1))
        with opened(server, prefix, ca_file=str(server.authority)) as storage:
            assert storage.batch_set(big, HASHES[:1], [source]) == [True]
            assert storage.batch_get(big, HASHES[:1], [target]) == [True]
        assert source.tobytes() == target.tobytes()

    def test_an_unknown_authority_is_unavailable(self, server: TlsRclone, prefix: str) -> None:
        with pytest.raises(StorageUnavailable, match="certificate"):
            opened(server, prefix)

    def test_it_may_be_trusted_all_the_same(self, server: TlsRclone, prefix: str) -> None:
        with opened(server, prefix, tls_verify=False) as storage:
            assert round_trip(storage)

    def test_silence_in_the_handshake_ends_in_time(self, server: TlsRclone, prefix: str) -> None:
        with FaultProxy(("127.0.0.1", server.port)) as proxy:
            proxy.go_silent()
            url = f"https://localhost:{proxy.address[1]}"
            with ends_in(2), pytest.raises(StorageTimeout):
                opened(server, prefix, endpoint_url=url, timeout_s=0.5)


class TestCost:
    def test_pages_are_neither_copied_in_nor_out(self, ministack: Ministack, prefix: str) -> None:
        nbytes = 16 << 20
        big = space(page_nbytes=nbytes)
        source, target = page(nbytes), blank(nbytes)
        # The limit is long, because this server's time grows with the square of the page size.
        with opened(ministack, prefix, timeout_s=100.0) as storage:
            storage.batch_exists(big, HASHES[:1])
            tracemalloc.start()
            try:
                assert storage.batch_set(big, HASHES[:1], [source]) == [True]
                assert storage.batch_get(big, HASHES[:1], [target]) == [True]
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        assert peak < nbytes / 50
        assert source.tobytes() == target.tobytes()

    def test_requests_are_as_few_as_the_protocol_allows(
        self, ministack: Ministack, prefix: str
    ) -> None:
        with ExitStack() as stack:
            proxy = stack.enter_context(FaultProxy(("127.0.0.1", ministack.port)))
            url = f"http://127.0.0.1:{proxy.address[1]}"
            storage = stack.enter_context(opened(ministack, prefix, endpoint_url=url))

            def turns(call: Any) -> int:
                before = proxy.turns
                call()
                return proxy.turns - before

            pages, count = [page() for _ in HASHES], len(HASHES)
            assert count == turns(lambda: storage.batch_set(space(), HASHES, pages))
            assert count == turns(lambda: storage.batch_exists(space(), HASHES))
            assert count == turns(lambda: storage.batch_get(space(), HASHES, pages))
            assert turns(lambda: storage.batch_delete(space(), HASHES)) == 1
            assert turns(lambda: list(storage.scan(space()))) == 1
            assert turns(lambda: storage.open_space(space())) == 1

    def test_connections_are_kept(self, rclone: Rclone, prefix: str) -> None:
        with (
            FaultProxy(("127.0.0.1", rclone.port)) as proxy,
            opened(
                rclone, prefix, endpoint_url=f"http://127.0.0.1:{proxy.address[1]}", fan_out=4
            ) as storage,
        ):
            for _ in range(5):
                storage.batch_exists(space(), HASHES)
            assert proxy.connections <= 5

    def test_connections_that_were_idle_for_long_are_not_used(
        self, rclone: Rclone, prefix: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with (
            FaultProxy(("127.0.0.1", rclone.port)) as proxy,
            opened(
                rclone, prefix, endpoint_url=f"http://127.0.0.1:{proxy.address[1]}", fan_out=1
            ) as storage,
        ):
            before = proxy.connections
            monkeypatch.setattr(connections, "_KEPT_S", 0.0)
            for page_hash in HASHES[:3]:
                storage.batch_exists(space(), [page_hash])

            assert proxy.connections - before == 3


class TestPresence:
    def test_a_large_page_that_is_there_is_not_sent(
        self, ministack: Ministack, prefix: str
    ) -> None:
        nbytes = 2 << 20
        big = space(page_nbytes=nbytes)
        with FaultProxy(("127.0.0.1", ministack.port)) as proxy:
            url = f"http://127.0.0.1:{proxy.address[1]}"
            with opened(ministack, prefix, endpoint_url=url) as storage:
                storage.batch_set(big, HASHES[:1], [page(nbytes)])
                before = proxy.bytes_up

                assert storage.batch_set(big, HASHES[:1], [page(nbytes)]) == [True]
                assert proxy.bytes_up - before < 4096
                assert storage.stats().counters["present"] == 1

    @pytest.mark.parametrize("kind", ["ministack", "rclone"])
    @pytest.mark.parametrize("nbytes", [0, 4095, 4097])
    def test_an_object_of_another_size_is_healed(
        self, kind: str, nbytes: int, prefix: str, request: pytest.FixtureRequest
    ) -> None:
        server: S3Server = request.getfixturevalue(kind)
        with opened(server, prefix) as storage, plain_client(server) as client:
            name = name_of(space(), HASHES[0], prefix)
            client.put_object(Bucket=BUCKET, Key=name, Body=bytes(nbytes))

            assert storage.batch_get(space(), HASHES[:1], [blank()]) == [False]
            assert round_trip(storage)

    def test_checksums_are_kept_and_checked(self, ministack: Ministack, prefix: str) -> None:
        with opened(ministack, prefix, checksum="crc32") as storage:
            assert round_trip(storage)


class TestClose:
    def test_it_ends_a_call_that_waits(self, rclone: Rclone, prefix: str) -> None:
        raised: list[BaseException] = []
        with FaultProxy(("127.0.0.1", rclone.port)) as proxy:
            storage = opened(
                rclone, prefix, endpoint_url=f"http://127.0.0.1:{proxy.address[1]}", timeout_s=30
            )

            def call() -> None:
                try:
                    storage.batch_get(space(), HASHES, [blank() for _ in HASHES])
                except StorageClosed as error:
                    raised.append(error)

            proxy.go_silent()
            thread = threading.Thread(target=call)
            thread.start()
            wait_until(lambda: proxy.held > 0)
            with ends_in(5):
                storage.close()
            thread.join(5)
        assert len(raised) == 1

    def test_a_forked_child_works_on_connections_of_its_own(
        self, rclone: Rclone, prefix: str
    ) -> None:
        with opened(rclone, prefix) as storage:
            assert round_trip(storage)
            child = os.fork()
            if child == 0:  # pragma: no cover - another process
                try:
                    os._exit(0 if round_trip(storage) else 1)
                finally:
                    os._exit(2)
            assert round_trip(storage)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            assert round_trip(storage)
