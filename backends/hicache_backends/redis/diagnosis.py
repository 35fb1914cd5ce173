"""The facts of a server's INFO that an operator should know."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from hicache_backends.redis.server_pool import parse_info
from hicache_storage.settings import format_nbytes
from hicache_storage.storage import Diagnosis

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_CLOCK_SKEW_S = 5.0
_NBYTES = re.compile(r"[0-9]{1,20}")


def diagnoses(info: str) -> Iterator[Diagnosis]:
    """Yield the facts of one server."""
    fields = parse_info(info)
    if not fields:
        yield Diagnosis(
            "server", "INFO is forbidden for this user", "allow INFO: eviction cannot be seen"
        )
        return
    yield _server(fields)
    yield _eviction(fields)
    yield _persistence(fields)
    yield from _clock(fields)


def _server(fields: Mapping[str, str]) -> Diagnosis:
    name, version = "Redis", fields.get("redis_version", "of unknown version")
    if "valkey_version" in fields:
        name, version = "Valkey", fields["valkey_version"]
    role = fields.get("role", "of unknown role")
    advice = "" if role != "slave" else "it refuses writes: name the master, or the sentinels"
    return Diagnosis(
        "server", f"{name} {version}, {'replica' if role == 'slave' else role}", advice
    )


def _eviction(fields: Mapping[str, str]) -> Diagnosis:
    policy, limit = fields.get("maxmemory_policy", "unknown"), fields.get("maxmemory", "0")
    if limit == "0":
        return Diagnosis(
            "eviction",
            f"maxmemory is not set, the policy is {policy}",
            "set maxmemory: without it the server grows until the system ends it",
        )
    used, most = (_size(nbytes) for nbytes in (fields.get("used_memory", "0"), limit))
    fact = f"{policy}, {used} of {most} are used"
    if policy == "noeviction":
        return Diagnosis(
            "eviction",
            fact,
            "a full server refuses pages: set maxmemory-policy allkeys-lru if old pages may go",
        )
    return Diagnosis("eviction", fact)


def _size(nbytes: str) -> str:
    return format_nbytes(float(nbytes)) if _NBYTES.fullmatch(nbytes) else nbytes


def _persistence(fields: Mapping[str, str]) -> Diagnosis:
    failed = [
        name
        for name in ("rdb_last_bgsave_status", "aof_last_bgrewrite_status", "aof_last_write_status")
        if fields.get(name, "ok") != "ok"
    ]
    log = "append-only file on" if fields.get("aof_enabled") == "1" else "append-only file off"
    if failed:
        return Diagnosis(
            "persistence",
            f"{log}; failed: {', '.join(failed)}",
            "the server may refuse writes until it can save: look at its log and its disk",
        )
    return Diagnosis("persistence", log)


def _clock(fields: Mapping[str, str]) -> Iterator[Diagnosis]:
    text = fields.get("server_time_usec", "")
    if not text.isdecimal():  # servers before Redis 7 do not tell
        return
    skew_s = int(text) / 1e6 - time.time()
    advice = "" if abs(skew_s) < _CLOCK_SKEW_S else "set both clocks by NTP: expiries need them"
    yield Diagnosis("clock", f"the server's is {skew_s:+z.1f} s from this machine's", advice)
