"""TLS of the redis backend: accepted certificates, unencrypted bytes, error messages."""

from __future__ import annotations

import multiprocessing
import os
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hicache_backends.redis import RedisSettings, RedisStorage
from hicache_backends.redis.connection import dial
from pages import hash_of, page, space
from redis_servers import OtherHostServer, RespServer, TlsSentinelServer, config_of, empty_reply
from servers import RedisServer, TlsRedisServer

from hicache_storage import ConfigError, StorageTimeout, StorageUnavailable
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.deadline_socket import DeadlineSocket

SECRET = "hunter2 %/"  # noqa: S105


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherHostServer]:
    with OtherHostServer(tmp_path_factory.mktemp("other")) as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsRedisServer]:
    with TlsRedisServer(tmp_path_factory.mktemp("tls")) as server:
        yield server


class TestHostNames:
    def test_a_certificate_of_another_host_is_refused(self, other: OtherHostServer) -> None:
        with pytest.raises(StorageUnavailable, match=r"localhost.*refused.*[Hh]ostname"):
            RedisStorage.from_config(config_of(other))

    @pytest.mark.parametrize("lax", [{"tls_verify": False}, {"option": "ssl_check_hostname=false"}])
    def test_only_who_asks_for_it_gets_no_comparison(
        self, other: OtherHostServer, lax: dict[str, Any]
    ) -> None:
        config = config_of(other) | lax
        if option := config.pop("option", None):
            config["url"] += f"/0?{option}"
        with RedisStorage.from_config(config) as storage:
            assert [False] == storage.batch_exists(space(), [hash_of(1)])

    def test_the_context_compares_names_whatever_the_default_of_redis_py_is(self) -> None:
        def context(**config: Any) -> ssl.SSLContext:
            access = RedisSettings.parse("redis", {"url": "rediss://here", **config}).access()
            assert access.context is not None
            return access.context

        assert context().check_hostname
        assert context(url="rediss://here?ssl_cert_reqs=optional").check_hostname
        assert context(url="rediss://here?ssl_check_hostname=").check_hostname
        assert ssl.CERT_REQUIRED == context().verify_mode
        assert not context(tls_verify=False).check_hostname
        assert ssl.CERT_NONE == context(tls_verify=False).verify_mode


class TestFiles:
    @pytest.mark.parametrize("field", ["tls_ca_file", "tls_cert_file"])
    def test_a_file_that_is_missing_is_named_when_the_storage_is_opened(
        self, tmp_path: Path, field: str
    ) -> None:
        path = str(tmp_path / "absent.pem")
        with pytest.raises(ConfigError, match=rf"{field}: '{path}'.*No such file"):
            RedisStorage.from_config({"url": "rediss://localhost:1", field: path})

    def test_a_file_without_certificates_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "empty.pem"
        path.write_text("nothing")
        with pytest.raises(ConfigError, match=r"tls_ca_file: .*empty\.pem.*PEM"):
            RedisStorage.from_config({"url": "rediss://localhost:1", "tls_ca_file": str(path)})

    def test_a_key_without_its_certificate_is_refused(self, server: TlsRedisServer) -> None:
        key = str(server.directory / "server.key")
        with pytest.raises(ConfigError, match="tls_key_file: needs tls_cert_file"):
            RedisStorage.from_config({**config_of(server), "tls_key_file": key})

    def test_a_key_of_another_certificate_is_refused(self, server: TlsRedisServer) -> None:
        files = {
            "tls_cert_file": str(server.directory / "ca.crt"),
            "tls_key_file": str(server.directory / "server.key"),
        }
        with pytest.raises(ConfigError, match=r"tls_cert_file: .* not a pair"):
            RedisStorage.from_config({**config_of(server), **files})

    @pytest.mark.parametrize(
        "option",
        [
            "ssl_cert_reqs=never",
            "ssl_ciphers=none-such",
            "ssl_min_version=7",
            "ssl_validate_ocsp=1",
        ],
    )
    def test_an_option_that_cannot_be_kept_is_refused(self, option: str) -> None:
        with pytest.raises(ConfigError, match="url"):
            RedisStorage.from_config({"url": f"rediss://localhost:1?{option}"})


class TestRotation:
    def test_a_new_password_is_read_when_the_server_refuses_the_old_one(
        self, tmp_path: Path
    ) -> None:
        secret = tmp_path / "secret"
        secret.write_text("the old one")
        with RedisServer(tmp_path / "redis", "--requirepass", "the old one") as server:
            config = {"url": server.url, "password_file": str(secret)}
            with RedisStorage.from_config(config) as storage:
                storage.batch_set(space(), [hash_of(7)], [page()])
                _change_password(server, "the old one", "the new one")

                with pytest.raises(StorageUnavailable, match="invalid username-password"):
                    storage.batch_exists(space(), [hash_of(7)])
                secret.unlink()
                with pytest.raises(StorageUnavailable, match="invalid username-password"):
                    storage.batch_exists(space(), [hash_of(7)])
                secret.write_text("the new one\n")
                with pytest.raises(StorageUnavailable, match="invalid username-password"):
                    storage.batch_exists(space(), [hash_of(7)])

                assert [True] == storage.batch_exists(space(), [hash_of(7)])

    def test_no_message_shows_the_new_password(self, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("the old one")

        is_rotated = threading.Event()

        def answer(command: list[bytes]) -> bytes | None:
            if is_rotated.is_set() and command == [b"AUTH", b"the old one"]:
                return b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"
            if command[0] != b"STRLEN":
                return empty_reply(command)
            is_new = [b"AUTH", b"the new one"] in scripted.commands
            return (
                b"-DENIED by the new one\r\n" if is_new else b"-NOAUTH Authentication required.\r\n"
            )

        with RespServer(answer) as scripted:
            config = {"url": scripted.url, "password_file": str(secret)}
            with RedisStorage.from_config(config) as storage:
                is_rotated.set()
                secret.write_text("the new one")
                for message in ("NOAUTH", "invalid username-password", r"DENIED by \*\*\*$"):
                    with pytest.raises(StorageUnavailable, match=message):
                        storage.batch_exists(space(), [hash_of(7)])


class TestForks:
    def test_a_child_opens_connections_of_its_own_without_the_files(
        self, server: TlsRedisServer, tmp_path: Path
    ) -> None:
        secret, authority = tmp_path / "secret", tmp_path / "ca.crt"
        secret.write_text(server.password)
        authority.write_bytes(server.authority.read_bytes())
        config = config_of(server) | {"tls_ca_file": str(authority), "password_file": str(secret)}
        del config["password"]
        context = multiprocessing.get_context("fork")
        with RedisStorage.from_config(config) as storage:
            storage.batch_set(space(), [hash_of(7)], [page()])
            secret.unlink()
            authority.unlink()
            child = context.Process(target=_exit_well_if_there, args=(storage,))
            child.start()
            child.join(30)

            assert 0 == child.exitcode
            assert [True] == storage.batch_exists(space(), [hash_of(7)])


def _change_password(server: RedisServer, old: str, new: str) -> None:
    """Change the password of a server, and end its connections."""
    with server.connected() as connection:
        for command in (
            f'AUTH "{old}"',
            f'CONFIG SET requirepass "{new}"',
            "CLIENT KILL TYPE normal",
        ):
            connection.sendall(f"{command}\r\n".encode())
            connection.recv(100)


def _exit_well_if_there(storage: RedisStorage) -> None:
    os._exit(0 if storage.batch_exists(space(), [hash_of(7)]) == [True] else 1)


class TestShutDown:
    def test_a_connection_that_is_ended_stays_encrypted(self, server: TlsRedisServer) -> None:
        """The thread that uses the connection may still send a password or a page."""
        settings = RedisSettings.parse("redis", config_of(server))
        deadline = Deadline(30)
        sock = DeadlineSocket(dial(settings.address, settings.access().context, deadline), deadline)
        try:
            sock.shut_down()

            assert sock.version() is not None
            with pytest.raises(OSError, match=r"EOF|Broken pipe|closed"):
                sock.sendall(b"in clear")
        finally:
            sock.close()


class TestSchemes:
    def test_tls_to_a_plain_server_is_named_in_the_error(self, tmp_path: Path) -> None:
        with RedisServer(tmp_path) as plain:
            url = plain.url.replace("redis://", "rediss://")
            with pytest.raises((StorageTimeout, StorageUnavailable), match="TLS on this port"):
                RedisStorage.from_config({"url": url, "timeout_s": 2})

    def test_plain_text_to_a_tls_server_is_named_in_the_error(self, server: TlsRedisServer) -> None:
        with pytest.raises(StorageUnavailable, match="rediss://"):
            RedisStorage.from_config({"url": server.url, "timeout_s": 5})

    def test_a_handshake_that_is_not_answered_ends_with_the_call(self) -> None:
        with RespServer(lambda _: None) as silent:
            url = silent.url.replace("redis://", "rediss://")
            with pytest.raises(StorageTimeout, match="TLS handshake"):
                RedisStorage.from_config({"url": url, "timeout_s": 1})


class TestSentinels:
    def test_nothing_goes_to_them_in_clear_where_the_url_asks_for_tls(self) -> None:
        with RespServer(empty_reply) as sentinel:
            config = {
                "url": "rediss://ignored",
                "sentinels": [f"127.0.0.1:{sentinel.port}"],
                "sentinel_master": "m",
                "sentinel_username": "watcher",
                "sentinel_password": SECRET,
                "timeout_s": 2,
            }
            with pytest.raises((StorageTimeout, StorageUnavailable), match="TLS"):
                RedisStorage.from_config(config)

            assert b"hunter2" not in sentinel.raw
            assert b"watcher" not in sentinel.raw
            assert b"\x16" == sentinel.raw[:1]  # a TLS handshake

    def test_a_password_of_theirs_cannot_be_sent_in_clear_by_config(self) -> None:
        with pytest.raises(ConfigError, match="sentinel_tls"):
            RedisStorage.from_config(
                {
                    "url": "rediss://ignored",
                    "sentinels": ["here:1"],
                    "sentinel_master": "m",
                    "sentinel_password": SECRET,
                    "sentinel_tls": False,
                }
            )

    def test_they_are_asked_over_tls_with_their_password(self, tmp_path: Path) -> None:
        with (
            TlsRedisServer(tmp_path / "master") as master,
            TlsSentinelServer(tmp_path / "sentinel", master, SECRET) as sentinel,
        ):
            config = config_of(master) | {
                "url": "rediss://ignored",
                "sentinels": [f"localhost:{sentinel.port}"],
                "sentinel_master": sentinel.master,
                "sentinel_password": SECRET,
            }
            with RedisStorage.from_config(config) as storage:
                assert [True] == storage.batch_set(space(), [hash_of(1)], [page()])
            with pytest.raises(StorageUnavailable) as raised:
                RedisStorage.from_config({**config, "sentinel_password": "wrong-one"})
            assert "wrong-one" not in str(raised.value)

    def test_they_may_speak_without_tls_where_they_have_no_password(self, tmp_path: Path) -> None:
        with (
            TlsRedisServer(tmp_path / "master") as master,
            TlsSentinelServer(tmp_path / "sentinel", master, "", is_plain=True) as sentinel,
        ):
            config = config_of(master) | {
                "url": "rediss://ignored",
                "sentinels": [f"127.0.0.1:{sentinel.port}"],
                "sentinel_master": sentinel.master,
            }
            with RedisStorage.from_config({**config, "sentinel_tls": False}) as storage:
                assert [False] == storage.batch_exists(space(), [hash_of(1)])
            with pytest.raises((StorageTimeout, StorageUnavailable), match="TLS"):
                RedisStorage.from_config({**config, "timeout_s": 1})
