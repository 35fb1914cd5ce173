"""The config of the redis backend: what is refused, by which name, and where secrets may come from."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

import pytest
from hicache_backends.redis import RedisSettings
from hicache_backends.redis._address import Address

from hicache_storage import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

URL = "redis://127.0.0.1:6379/0"


def parsed(**config: Any) -> RedisSettings:
    return RedisSettings.parse("redis", {"url": URL, **config})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"url": "http://here"}, "url"),
        ({"url": "redis://here:port"}, "url"),
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
        ({"password": "a", "password_file": "b"}, "password"),
        ({"url": "redis://:secret@here", "password_env": "B"}, "password_env"),
        ({"retention": "x"}, "retention"),
    ],
)
def test_a_wrong_config_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parsed(**config)


def test_no_secret_is_repeated() -> None:
    with pytest.raises(ConfigError) as raised:
        parsed(url="redis://:hunter2@here:port", password="hunter3")  # noqa: S106

    assert "hunter" not in str(raised.value)
    assert "hunter" not in repr(parsed(url="redis://:hunter2@here"))


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


def test_a_place_shows_no_secret() -> None:
    assert "here:6380" == parsed(url="redis://me:hunter2@here:6380/1").place
    assert "/run/redis" == parsed(url="unix://me:hunter2@/run/redis").place


def test_what_redis_py_takes_in_a_url_is_given_to_it() -> None:
    settings = parsed(url="rediss://me:s%2Fecret@here:1/2?ssl_cert_reqs=none")
    access = settings.access()

    assert {"db": 2, "username": "me", "password": "s/ecret"} == access.options
    assert access.context is not None
    assert ssl.CERT_NONE == access.context.verify_mode
    assert Address("here", 1) == settings.address
