"""The fields of INFO that an operator should know become facts with advice."""

from __future__ import annotations

import pytest
from hicache_backends.redis.diagnosis import diagnoses


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
