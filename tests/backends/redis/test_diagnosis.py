"""The fields of INFO that an operator should know become facts with advice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hicache_backends.redis.diagnosis import diagnoses
from servers import ROOT

if TYPE_CHECKING:
    from hicache_storage.storage import Diagnosis


@pytest.mark.parametrize(
    ("info", "topic", "words"),
    [
        ("", "server", "INFO is forbidden"),
        ("redis_version:7.2.4\nrole:slave", "server", "refuses writes"),
        ("redis_version:8.0.0\nvalkey_version:8.1.0\nrole:master", "server", "Valkey 8.1.0"),
        ("role:master\naof_last_write_status:err", "persistence", "failed: aof_last_write_status"),
        ("role:master\nserver_time_usec:1000000", "clock", "set both clocks by NTP"),
    ],
)
def test_what_a_redis_says_is_understood(info: str, topic: str, words: str) -> None:
    found = {one.topic: f"{one.fact} {one.advice}" for one in diagnoses(info)}

    assert words in found[topic]


@pytest.mark.parametrize(
    ("policy", "ttl_s", "advice"),
    [
        ("noeviction", None, "set ttl_s, and maxmemory-policy volatile-ttl,"),
        ("allkeys-lru", None, "set ttl_s, and maxmemory-policy volatile-ttl,"),
        ("volatile-ttl", None, "set ttl_s"),
        ("volatile-ttl", 60.0, ""),
    ],
)
def test_each_policy_gets_the_advice_of_the_documents(
    policy: str, ttl_s: float | None, advice: str
) -> None:
    found = _eviction(f"maxmemory:1000\nmaxmemory_policy:{policy}", ttl_s=ttl_s)

    assert advice in found.advice
    assert bool(advice) == bool(found.advice)
    assert "`volatile-ttl` with `ttl_s`" in (ROOT / "docs/backends/redis.md").read_text()


@pytest.mark.parametrize(
    ("used", "is_full"), [(100 << 20, True), (96 << 20, True), (90 << 20, False), (0, False)]
)
def test_a_server_near_its_limit_is_full(used: int, is_full: bool) -> None:  # noqa: FBT001
    found = _eviction(f"maxmemory:{100 << 20}\nmaxmemory_policy:allkeys-lru\nused_memory:{used}")

    assert is_full is found.is_full


def _eviction(info: str, *, ttl_s: float | None = None) -> Diagnosis:
    (found,) = (one for one in diagnoses(info, ttl_s=ttl_s) if one.topic == "eviction")
    return found
