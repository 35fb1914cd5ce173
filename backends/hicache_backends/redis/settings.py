"""The config of `redis`, and the options that redis-py gets from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import redis.connection
from pydantic import field_validator, model_validator

from hicache_backends.redis.access import PORT, URL_OPTIONS, Access, Address, tls_context
from hicache_storage.backend_support.redis_url import check_no_fragment, check_redis_url
from hicache_storage.backend_support.secret_sources import read_secret_file, read_secret_variable
from hicache_storage.settings import (
    Field,
    FileName,
    PositiveSeconds,
    Seconds,
    SecretStr,
    Settings,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

_connection: Any = redis.connection  # untyped
_parse_url: Callable[[str], dict[str, Any]] = _connection.parse_url
# Timeouts, retries and encodings are left out, because redis-py's would exceed the deadline of a
# call.
_URL_OPTIONS = ("db", "client_name")


class RedisSettings(Settings):
    """The config of `redis`."""

    url: SecretStr
    """`redis://`, `rediss://` (TLS) or `unix://`, as redis-py accepts it.

    For a cluster: any of its servers.
    """
    username: str | None = None
    password: SecretStr | None = None
    password_file: FileName | None = None
    """The file that contains the password.

    White space around the password is dropped. The file is read when the storage is opened, and again if
    a server refuses the password.
    """
    password_env: str | None = None
    """The environment variable that contains the password."""
    tls_ca_file: FileName | None = None
    tls_cert_file: FileName | None = None
    tls_key_file: FileName | None = None
    tls_verify: bool = True
    """False: accept any certificate of the server."""
    cluster: bool | None = None
    """True if the server is part of a cluster. None: ask the server."""
    sentinels: tuple[str, ...] = ()
    """`host:port` of each sentinel. `url` then gives everything except the server's address."""
    sentinel_master: str | None = None
    """The name by which the sentinels know the master."""
    sentinel_username: str | None = None
    sentinel_password: SecretStr | None = None
    sentinel_tls: bool | None = None
    """True if sentinels use TLS, with the certificates of `url`. None: as `url`."""
    prefix: str = Field(
        default="hicache:",
        pattern=r"^[A-Za-z0-9_.:/-]{1,128}$",
        description="1 to 128 letters, digits, or characters of _ . : / -",
    )
    """The beginning of all keys. Storages with the same prefix share their pages."""
    ttl_s: Seconds | None = Field(default=None, ge=0.001)
    """The time after which a page expires. None: never."""
    parallelism: int = Field(default=4, ge=1, le=64)
    """Concurrent calls of the page store in each direction. Each needs a connection."""
    depth: int = Field(default=4, ge=1, le=16)
    """How many large pages a connection has in flight for sets.

    For gets there are half as many, and for small pages there are more. While other connections of
    the process are in use, a set has only one page of 512 KiB or more in flight. 1: one page of
    32 KiB or more, in sets.
    """
    max_batch: int = Field(default=1024, ge=1, le=16384)
    timeout_s: PositiveSeconds = 10.0
    """The time limit of each call, including connecting and every retry."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: SecretStr) -> SecretStr:
        check_no_fragment(url.get_secret_value())
        try:
            options = _parse_url(url.get_secret_value())
        except ValueError:
            raise ValueError(
                "must begin with redis://, rediss:// or unix://, and a port must be a number"
            ) from None
        known = {"host", "port", "path", "username", "password", "connection_class", *_URL_OPTIONS}
        if url.get_secret_value().startswith("rediss://"):
            known |= URL_OPTIONS
        for name in options:
            if name not in known:
                raise ValueError(
                    f"does not take the option {name!r}: there is a field for it, or it is not"
                    " needed"
                )
        check_redis_url(url.get_secret_value())
        return url

    @field_validator("sentinels")
    @classmethod
    def _check_addresses(cls, sentinels: tuple[str, ...]) -> tuple[str, ...]:
        for text in sentinels:
            Address.parse(text)
        return sentinels

    @model_validator(mode="after")
    def _check_together(self) -> RedisSettings:
        given = [name for name in ("password", "password_file", "password_env") if vars(self)[name]]
        if "password" in self.url_options:
            given.append("url")
        if given[1:]:
            raise ValueError(f"{given[0]}: the password is given twice, here and in {given[1]}")
        if bool(self.sentinels) != bool(self.sentinel_master):
            raise ValueError("sentinel_master: give both sentinel_master and sentinels, or neither")
        for name in ("sentinel_username", "sentinel_password", "sentinel_tls"):
            if vars(self)[name] is not None and not self.sentinels:
                raise ValueError(f"{name}: needs sentinels")
        if self.sentinels and self.cluster:
            raise ValueError("cluster: a cluster has no sentinels")
        if self.is_tls and self.sentinel_password and self.sentinel_tls is False:
            raise ValueError("sentinel_tls: without it sentinel_password would be sent unencrypted")
        for name in ("tls_ca_file", "tls_cert_file", "tls_key_file"):
            if vars(self)[name] is not None and not (self.is_tls or self.sentinel_tls):
                raise ValueError(f"{name}: needs a url that begins with rediss://")
        return self

    @model_validator(mode="after")
    def _check_place(self) -> RedisSettings:
        if not self.sentinels and not {"host", "path"} & self.url_options.keys():
            raise ValueError("url: must name a host, or the path of a unix socket")
        return self

    @property
    def url_options(self) -> dict[str, Any]:
        """The options that redis-py parses from the URL."""
        return _parse_url(self.url.get_secret_value())

    @property
    def is_tls(self) -> bool:
        """True if the URL asks for TLS."""
        return self.url.get_secret_value().startswith("rediss://")

    @property
    def address(self) -> Address:
        """The server that the URL names."""
        options = self.url_options
        return Address(
            options.get("host", "localhost"), int(options.get("port", PORT)), options.get("path")
        )

    @property
    def place(self) -> str:
        """The server as messages show it, without a secret."""
        if self.sentinel_master is not None:
            return f"{self.sentinel_master}, by sentinels {', '.join(self.sentinels)}"
        return str(self.address)

    def secret(self) -> str | None:
        """Return the password from the field, file, variable or URL that has it.

        Raises:
            ValueError: The file or variable of a field cannot be read.
        """
        if self.password is not None:
            return self.password.get_secret_value()
        if self.password_file is not None:
            return read_secret_file("password_file", self.password_file)
        if self.password_env is not None:
            return read_secret_variable("password_env", self.password_env)
        return self.url_options.get("password")

    def access(self) -> Access:
        """Return everything that is needed to reach a server, except its address.

        Files are read here.

        Raises:
            ValueError: The file or variable of a field cannot be read, or a text cannot be sent.
        """
        url_options = self.url_options
        options = {name: url_options.get(name) for name in _URL_OPTIONS} | {
            "username": self.username or url_options.get("username"),
            "password": self.secret(),
        }
        return Access(_sendable(options), self._tls_context() if self.is_tls else None)

    def sentinel_access(self, context: ssl.SSLContext | None) -> Access:
        """Return everything that is needed to reach a sentinel.

        `context` is the TLS context of the servers, if they use TLS.

        Raises:
            ValueError: The file of a field cannot be read, or a text cannot be sent.
        """
        password = self.sentinel_password
        options = {
            "username": self.sentinel_username,
            "password": password.get_secret_value() if password else None,
        }
        if self.sentinel_tls is False:
            context = None
        elif self.sentinel_tls:
            context = context or self._tls_context()
        return Access(_sendable(options), context)

    def secrets(self, password: str | None) -> list[str]:
        """Return every text that no message may show: each secret, plain and as encoded in a URL."""
        key_password = self.url_options.get("ssl_password")
        fields = [one for one in (self.password, self.sentinel_password) if one is not None]
        secrets = [password, key_password, *(one.get_secret_value() for one in fields)]
        texts = {text for one in secrets if one for text in (one, quote(one, safe=""))}
        return sorted(texts, key=len, reverse=True)

    def _tls_context(self) -> ssl.SSLContext:
        return tls_context(
            self.url_options,
            ca_file=self.tls_ca_file,
            cert_file=self.tls_cert_file,
            key_file=self.tls_key_file,
            verify=self.tls_verify,
        )


def _sendable(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are set.

    Raises:
        ValueError: A text cannot be encoded as UTF-8, as servers expect it. JSON allows such text.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name}: must be text that UTF-8 can hold") from None
    return given
