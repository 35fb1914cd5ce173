"""The config of the redis backend: refused fields, and sources of secrets."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
from hicache_backends.redis import RedisSettings, RedisStorage
from hicache_backends.redis.access import Address

from hicache_storage import ConfigError

URL = "redis://127.0.0.1:6379/0"


def parsed(**config: Any) -> RedisSettings:
    return RedisSettings.parse("redis", {"url": URL, **config})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"url": "http://here"}, "url"),
        ({"url": "redis://here:port"}, "url"),
        ({"url": "redis://here/zero"}, "url: must end with a database number"),
        ({"url": "redis://here/0/1"}, "url: must end with a database number"),
        ({"url": "redis://here/-1"}, "url: must end with a database number"),
        ({"url": "redis://here/3?db=5"}, "url: must end with a database number"),
        ({"url": "redis://here?db="}, "url: gives an option twice, or db without"),
        ({"url": "redis://here?db=x"}, "url"),
        ({"url": "redis://here?db=1&db=2"}, "url: gives an option twice"),
        ({"url": "redis://here:0"}, "url: must have a port"),
        ({"url": "redis://here:6379/0#1"}, "url: has a '#'"),
        ({"url": "rediss://user:pw#1@here"}, "url: has a '#'"),
        ({"url": "redis://"}, "url: must name a host"),
        ({"url": "redis://:6379/0"}, "url: must name a host"),
        ({"url": "unix://"}, "url: must name a host, or the path"),
        ({"url": "unix://run/redis.sock"}, "url: must have three slashes"),
        ({"url": "redis://here?socket_timeout=3"}, "socket_timeout"),
        ({"url": "redis://here?protocol=3"}, "protocol"),
        ({"prefix": "a{b}"}, "prefix"),
        ({"prefix": "a*"}, "prefix"),
        ({"prefix": ""}, "prefix"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": float("inf")}, "ttl_s"),
        ({"depth": 0}, "depth"),
        ({"parallelism": 0}, "parallelism"),
        ({"sentinels": ["here:1"]}, "sentinel_master"),
        ({"sentinel_master": "m"}, "sentinel_master"),
        ({"sentinels": ["here"], "sentinel_master": "m"}, "sentinels"),
        ({"sentinels": ["here:1"], "sentinel_master": "m", "cluster": True}, "cluster"),
        ({"tls_ca_file": "/ca.crt"}, "tls_ca_file"),
        ({"sentinel_tls": True}, "sentinel_tls"),
        ({"sentinel_password": "x"}, "sentinel_password"),
        ({"url": "redis://here?ssl_cert_reqs=none"}, "ssl_cert_reqs"),
        ({"url": "rediss://here?ssl_ocsp_expected_cert=x"}, "ssl_ocsp_expected_cert"),
        ({"password": "a", "password_file": "b"}, "password"),
        ({"url": "redis://:secret@here", "password_env": "B"}, "password_env"),
        ({"retention": "x"}, "retention"),
    ],
)
def test_a_wrong_config_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parsed(**config)


@pytest.mark.parametrize(
    "url", ["redis://here/", "redis://here?db=3", "redis://u:p%23@here:1/15", "unix:///s?db=3"]
)
def test_a_right_url_is_taken(url: str) -> None:
    assert "here" in str(parsed(url=url).address) or "/s" == parsed(url=url).place


def test_a_url_beside_sentinels_names_no_host() -> None:
    assert (
        parsed(url="redis:///3", sentinels=["here:1"], sentinel_master="m").url_options["db"] == 3
    )


def test_no_secret_is_repeated() -> None:
    with pytest.raises(ConfigError) as raised:
        parsed(url="redis://:hunter2@here:port", password="hunter3")  # noqa: S106

    assert "hunter" not in str(raised.value)
    assert "hunter" not in repr(parsed(url="redis://:hunter2@here"))


@pytest.mark.parametrize("field", ["password", "username"])
def test_a_text_that_no_server_can_get_is_refused(field: str) -> None:
    """Lone surrogates come from JSON, and from environment variables that are not UTF-8."""
    with pytest.raises(ConfigError, match=f"{field}: must be text that UTF-8 can hold"):
        RedisStorage.from_config({"url": URL, field: "\udc80"})


def test_a_password_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("open sesame\n")

    assert "open sesame" == parsed(password_file=str(tmp_path / "secret")).secret()


def test_a_password_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_PASSWORD", "open sesame")

    assert "open sesame" == parsed(password_env="CACHE_PASSWORD").secret()  # noqa: S106


@pytest.mark.parametrize("field", ["password_file", "password_env"])
def test_a_secret_that_is_not_there_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        parsed(**{field: "/no/such"}).secret()


def test_a_variable_that_is_not_there_is_named_unless_it_may_be_the_password() -> None:
    with pytest.raises(ValueError, match="'CACHE_PASSWORD'"):
        parsed(password_env="CACHE_PASSWORD").secret()  # noqa: S106
    with pytest.raises(ValueError, match="password_env") as raised:
        parsed(password_env="hunter2").secret()  # noqa: S106

    assert "hunter2" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    absent, empty, binary = tmp_path / "absent", tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe")
    for path, reason in ((absent, "No such file"), (empty, "is empty"), (binary, "not hold text")):
        with pytest.raises(ValueError, match=f"password_file: '{path}'.*{reason}"):
            parsed(password_file=str(path)).secret()
    with pytest.raises(ValueError, match="password_file") as raised:
        parsed(password_file="hunter2").secret()  # noqa: S106
    assert "hunter2" not in str(raised.value)


def test_an_empty_variable_is_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_PASSWORD", "")
    with pytest.raises(ValueError, match="empty"):
        parsed(password_env="CACHE_PASSWORD").secret()  # noqa: S106


def test_a_server_opener_shows_no_secret() -> None:
    access = parsed(url="redis://:hunter2@here").access()

    assert "hunter2" == access.options["password"]
    assert "hunter2" not in repr(access)


def test_a_master_of_sentinels_is_the_place() -> None:
    config = {"sentinels": ["one:1", "two:2"], "sentinel_master": "pages"}
    assert "pages, by sentinels one:1, two:2" == parsed(**config).place


def test_a_place_shows_no_secret() -> None:
    assert "here:6380" == parsed(url="redis://me:hunter2@here:6380/1").place
    assert "/run/redis" == parsed(url="unix://me:hunter2@/run/redis").place


def test_url_options_of_redis_py_are_passed_on() -> None:
    settings = parsed(url="rediss://me:s%2Fecret@here:1/2?ssl_cert_reqs=none")
    access = settings.access()

    assert {"db": 2, "username": "me", "password": "s/ecret"} == access.options
    assert access.context is not None
    assert ssl.CERT_NONE == access.context.verify_mode
    assert Address("here", 1) == settings.address
