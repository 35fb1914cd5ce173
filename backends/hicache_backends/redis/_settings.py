"""The config of `redis`, and what redis-py is given of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis.connection
from pydantic import field_validator, model_validator

from hicache_storage.settings import Field, PositiveSeconds, SecretStr, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

_connection: Any = redis.connection  # untyped
_parse_url: Callable[[str], dict[str, Any]] = _connection.parse_url
# Timeouts, retries and encodings are this backend's own; redis-py's would break its promises.
_URL_OPTIONS = ("db", "client_name")
_MAX_PORT = 65535


class RedisSettings(Settings):
    """The config of `redis`."""

    url: SecretStr
    """`redis://`, `rediss://` (TLS) or `unix://`, as redis-py takes it; of a cluster: any server."""
    username: str | None = None
    password: SecretStr | None = None
    password_file: str | None = None
    """The file that holds the password; white space around it is dropped. Read once, when opened."""
    password_env: str | None = None
    """The environment variable that holds the password."""
    tls_ca_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_verify: bool = True
    """False: the server may have any certificate."""
    cluster: bool | None = None
    """Whether the server is one of a cluster. None: it is asked."""
    sentinels: tuple[str, ...] = ()
    """`host:port` of each sentinel; `url` then gives everything but the server's address."""
    sentinel_master: str | None = None
    """What the sentinels call the server."""
    sentinel_username: str | None = None
    sentinel_password: SecretStr | None = None
    prefix: str = Field(default="hicache:", pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")
    """What all keys begin with. Everything that shares it shares its pages."""
    ttl_s: float | None = Field(default=None, ge=0.001, allow_inf_nan=False)
    """Pages go so long after they were set. None: never."""
    parallelism: int = Field(default=4, ge=1, le=64)
    """Calls that the page store makes at once in each direction; each needs a connection."""
    depth: int = Field(default=4, ge=1, le=16)
    """Large pages under way at once on a connection, in gets half as many; of small ones more."""
    max_batch: int = Field(default=1024, ge=1, le=16384)
    timeout_s: PositiveSeconds = 10.0
    """For each call as a whole, connecting and every further try included."""

    @field_validator("url")
    @classmethod
    def _is_understood(cls, url: SecretStr) -> SecretStr:
        try:
            options = _parse_url(url.get_secret_value())
        except ValueError:
            raise ValueError(
                "must be redis://, rediss:// or unix://, with a number as port"
            ) from None
        known = {"host", "port", "path", "username", "password", "connection_class", *_URL_OPTIONS}
        for name in options:
            if name not in known and not name.startswith("ssl_"):
                raise ValueError(f"takes no option {name!r}: there is a field for it, or no need")
        return url

    @field_validator("sentinels")
    @classmethod
    def _are_addresses(cls, sentinels: tuple[str, ...]) -> tuple[str, ...]:
        for text in sentinels:
            address(text)
        return sentinels

    @model_validator(mode="after")
    def _agree(self) -> RedisSettings:
        given = [name for name in ("password", "password_file", "password_env") if vars(self)[name]]
        if "password" in self.url_options:
            given.append("url")
        if given[1:]:
            raise ValueError(f"{given[0]}: the password is given twice, here and in {given[1]}")
        if bool(self.sentinels) != bool(self.sentinel_master):
            raise ValueError("sentinel_master: it and sentinels are needed together")
        if self.sentinels and self.cluster:
            raise ValueError("cluster: a cluster has no sentinels")
        for name in ("tls_ca_file", "tls_cert_file", "tls_key_file"):
            if vars(self)[name] is not None and not self.is_tls:
                raise ValueError(f"{name}: needs a url that begins with rediss://")
        return self

    @property
    def url_options(self) -> dict[str, Any]:
        """What redis-py makes of the URL."""
        return _parse_url(self.url.get_secret_value())

    @property
    def is_tls(self) -> bool:
        """Whether the URL asks for TLS."""
        return self.url.get_secret_value().startswith("rediss://")

    @property
    def place(self) -> str:
        """The server for people: never a secret."""
        options = self.url_options
        return str(options.get("path") or f"{options.get('host', 'localhost')}:{self.port}")

    @property
    def port(self) -> int:
        """Of the URL."""
        return int(self.url_options.get("port", 6379))

    def secret(self) -> str | None:
        """The password, wherever it is.

        Raises:
            ValueError: Names the field whose file or variable cannot be read.
        """
        if self.password is not None:
            return self.password.get_secret_value()
        if self.password_file is not None:
            try:
                return Path(self.password_file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError):
                raise ValueError("password_file: it cannot be read") from None
        if self.password_env is not None:
            if self.password_env not in os.environ:
                raise ValueError("password_env: there is no such environment variable")
            return os.environ[self.password_env]
        return None

    def connection_options(self) -> dict[str, Any]:
        """The arguments of a redis-py connection, but for its class and its timeouts.

        Raises:
            ValueError: Names the field whose file or variable cannot be read.
        """
        options = self.url_options
        options.pop("connection_class", None)
        options["protocol"] = 2  # in RESP3 a miss has another length, and servers may push
        options |= _given(username=self.username, password=self.secret())
        if self.is_tls:
            options |= _given(
                ssl_ca_certs=self.tls_ca_file,
                ssl_certfile=self.tls_cert_file,
                ssl_keyfile=self.tls_key_file,
            )
            if not self.tls_verify:
                options |= {"ssl_cert_reqs": "none", "ssl_check_hostname": False}
        return options


def address(text: str) -> tuple[str, int]:
    """Host and port of `host:port`.

    Raises:
        ValueError: It is something else.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) <= _MAX_PORT:
        raise ValueError("must be host:port")
    return host.strip("[]"), int(port)


def _given(**options: str | None) -> dict[str, str]:
    return {name: value for name, value in options.items() if value is not None}
