from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hicache_conformance.tools.network.endpoints import Endpoint, endpoints_in, redirected
from hypothesis import given, settings
from hypothesis import strategies as st

TARGET = ("127.0.0.9", 40001)


def found(value: Any) -> list[tuple[str, int]]:
    return [(each.host, each.port) for each in endpoints_in({"field": value})]


def moved(value: Any) -> Any:
    """Return the value with every endpoint in it redirected to `TARGET`."""
    config = {"field": value}
    return redirected(config, dict.fromkeys(endpoints_in(config), TARGET))["field"]


@pytest.mark.parametrize(
    ("text", "endpoints", "there"),
    [
        ("redis://127.0.0.1:6379/0", [("127.0.0.1", 6379)], "redis://127.0.0.9:40001/0"),
        ("redis://:p@localhost/0?a=b:1", [("localhost", 6379)], "redis://:p@127.0.0.9:40001/0?a=b:1"),
        ("rediss://u:p%40:w@db.example:7000", [("db.example", 7000)], "rediss://u:p%40:w@127.0.0.9:40001"),
        ("redis://:p@ss:1@h:2", [("h", 2)], "redis://:p@ss:1@127.0.0.9:40001"),
        ("http://localhost:9000", [("localhost", 9000)], "http://127.0.0.9:40001"),
        ("http://minio", [("minio", 80)], "http://127.0.0.9:40001"),
        ("HTTPS://minio/x#y", [("minio", 443)], "HTTPS://127.0.0.9:40001/x#y"),
        ("etcd://[::1]:2379", [("::1", 2379)], "etcd://127.0.0.9:40001"),
        ("s3://bucket.example:9000/a", [("bucket.example", 9000)], "s3://127.0.0.9:40001/a"),
        ("127.0.0.1:6379", [("127.0.0.1", 6379)], "127.0.0.9:40001"),
        ("localhost:80", [("localhost", 80)], "127.0.0.9:40001"),
        ("cache.example:80", [("cache.example", 80)], "127.0.0.9:40001"),
        ("minio:9000", [("minio", 9000)], "127.0.0.9:40001"),
        ("[::1]:9000", [("::1", 9000)], "127.0.0.9:40001"),
    ],
)  # fmt: skip
def test_an_endpoint_in_a_text(text: str, endpoints: list[tuple[str, int]], there: str) -> None:
    assert endpoints == found(text)
    assert there == moved(text)


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("redis://a:1,redis://:p@b:2/0", "redis://127.0.0.9:40001,redis://:p@127.0.0.9:40001/0"),
        ("http://a:1; http://b:2/", "http://127.0.0.9:40001; http://127.0.0.9:40001/"),
        ("mongodb://u:p@a:1,b:2/db", "mongodb://u:p@127.0.0.9:40001,127.0.0.9:40001/db"),
        ("a:1024, b:1025", None),
        ("a.x:1,b.x:2", "127.0.0.9:40001,127.0.0.9:40001"),
    ],
)
def test_several_endpoints_in_one_text(text: str, there: str | None) -> None:
    assert 2 == len(found(text))
    assert (there or "127.0.0.9:40001, 127.0.0.9:40001") == moved(text)


@pytest.mark.parametrize(
    "value",
    [
        "", "/tmp/a:1/b", "12:30", "12:30:15", "2024-01-01T12:30", "s3://bucket/key", "redis:7",
        "file:///tmp/a:1", "unix:///run/x.sock", "layer:3", "a.b:0", "a.b:70000", "v1.2:3000", "a b:c",
        "127.0.0.1", "localhost", ":6379", "sha256:aa11", '{"a": 1}', "llama-3.1:8080", 6379, None,
        True, 1.5, b"127.0.0.1:6379", Path("/127.0.0.1:6379"), "tcp://host", "http://", "http://host:x/",
        "127.0.0.1:6379/0", "127.0.0.1:6379 or so",
    ],
)  # fmt: skip
def test_a_text_that_is_no_endpoint_is_left_alone(value: object) -> None:
    assert [] == found(value)
    assert value == moved(value)


@pytest.mark.parametrize(
    ("fields", "endpoint", "there"),
    [
        ({"host": "db", "port": 1}, ("db", 1), {"host": "127.0.0.9", "port": 40001}),
        ({"hostname": "db", "port": "1"}, ("db", 1), {"hostname": "127.0.0.9", "port": "40001"}),
        ({"port": 1, "server": "db"}, ("db", 1), {"port": 40001, "server": "127.0.0.9"}),
        ({"address": "::1", "port": 1}, ("::1", 1), {"address": "127.0.0.9", "port": 40001}),
        (
            {"redis_host": "10.0.0.1", "redis_port": 1, "port": 2},
            ("10.0.0.1", 1),
            {"redis_host": "127.0.0.9", "redis_port": 40001, "port": 2},
        ),
    ],
)
def test_fields_side_by_side(
    fields: dict[str, Any], endpoint: tuple[str, int], there: dict[str, Any]
) -> None:
    assert [endpoint] == found(fields)
    assert there == moved(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "db"},
        {"port": 1},
        {"host": "db", "nested": {"port": 1}},
        {"host": "/run/x", "port": 1},
        {"host": None, "port": 1},
        {"host": "db", "port": 0},
        {"host": "db", "port": True},
        {"host": "db", "port": None},
        {"host": "db", "redis_port": 1},
        {1: "db", "port": 1},
    ],
)
def test_fields_that_are_no_pair(fields: dict[Any, Any]) -> None:
    assert [] == found(fields)


def test_nested_values_are_searched_in_order_and_each_endpoint_is_named_once() -> None:
    config = {
        "nodes": [{"host": "a", "port": 1}, ("b.x:2", "c.x:3")],
        "deep": MappingProxyType({"deeper": {"url": "http://a:1/x"}}),
    }

    assert [("a", 1), ("b.x", 2), ("c.x", 3)] == found(config)


def test_only_the_endpoints_named_are_redirected() -> None:
    config = {"a": "a.x:1", "b": "b.x:1", "both": "a.x:1,b.x:1"}

    there = redirected(config, {Endpoint("b.x", 1): ("c", 3)})

    assert {"a": "a.x:1", "b": "c:3", "both": "a.x:1,c:3"} == there


def test_a_target_with_colons_gets_brackets() -> None:
    there = redirected({"url": "http://h:1/x"}, {Endpoint("h", 1): ("::1", 2)})

    assert {"url": "http://[::1]:2/x"} == there


def test_the_config_given_stays_as_it_was_and_shares_nothing() -> None:
    config: dict[str, Any] = {"nodes": ["a.x:1", {"host": "a.x", "port": 1}], "rest": {"list": [1]}}

    there = redirected(config, {Endpoint("a.x", 1): TARGET})
    there["nodes"][1]["more"] = 1
    there["rest"]["list"].append(2)

    assert {"nodes": ["a.x:1", {"host": "a.x", "port": 1}], "rest": {"list": [1]}} == config


@settings(deadline=None)  # The machine may be busy.
@given(text=st.text(alphabet="ab1:/@,;?#.[] ", max_size=30))
def test_any_text_stays_as_it_is_where_nothing_is_redirected(text: str) -> None:
    config = {"a": text, "b": f"redis://{text}", "c": {"host": text, "port": 1}}

    endpoints_in(config)

    assert config == redirected(config, {})


@settings(deadline=None)  # The machine may be busy.
@given(text=st.text(alphabet="ab1:/@,;?#.[] ", max_size=30))
def test_a_redirected_config_names_the_target_alone(text: str) -> None:
    there = moved(f"redis://{text}")

    assert found(there) in ([TARGET], [])
    assert bool(found(f"redis://{text}")) == (found(there) == [TARGET])
