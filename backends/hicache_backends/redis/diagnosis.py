"""Pick the facts from a server's INFO that an operator should see."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_backends.redis.server_pool import NUMBER, parse_info
from hicache_storage.settings import format_nbytes, format_skew
from hicache_storage.storage import Diagnosis

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_CLOCK_SKEW_S = 5.0
_ONE_ADVICE = "set ttl_s, and maxmemory-policy volatile-ttl,"
"""The advice of docs/backends/redis.md."""
_ROOM_SHARE = 0.05
_ROOM_NBYTES = 64 << 20
"""A server counts as full if less than this, and less than `_ROOM_SHARE` of its limit, is free.

The space is never used up completely, because a server that evicts keeps space for a few pages.
"""


def diagnoses(info: str, *, ttl_s: float | None = None) -> Iterator[Diagnosis]:
    """Yield the facts of one server. `ttl_s` is the life of a page; None: pages do not expire."""
    fields = parse_info(info)
    if not fields:
        yield Diagnosis(
            "server",
            "INFO is forbidden for this user",
            "allow INFO, because eviction cannot be seen without it",
            free_nbytes=0,
        )
        return
    yield _server(fields)
    yield _eviction(fields, expires=ttl_s is not None)
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


def _eviction(fields: Mapping[str, str], *, expires: bool) -> Diagnosis:
    policy, limit = fields.get("maxmemory_policy", "unknown"), _number(fields, "maxmemory")
    if limit == 0:
        return Diagnosis(
            "eviction",
            f"maxmemory is not set, and the policy is {policy}",
            "set maxmemory: without it the server grows until the system kills it",
        )
    used = _number(fields, "used_memory") - _number(fields, "mem_not_counted_for_evict")
    is_full = limit - used < min(_ROOM_NBYTES, limit * _ROOM_SHARE)
    advice = ""
    if policy == "noeviction":
        advice = f"a full server refuses pages: {_ONE_ADVICE} if old pages may go"
    elif policy.startswith("volatile") and not expires:
        advice = "no page expires, so a full server refuses pages: set ttl_s"
    elif policy.startswith("allkeys"):
        advice = f"listings walk through the whole database: {_ONE_ADVICE} if they are too slow"
    fact = f"{policy}, {format_nbytes(used)} of {format_nbytes(limit)} are used"
    return Diagnosis("eviction", fact, advice, is_full, _free_nbytes(limit - used))


def _free_nbytes(free: int) -> int:
    """Return how many bytes of pages fit into free memory. A page takes up to half more than that."""
    return max(0, free * 2 // 3)


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
            "the server may refuse writes until it can save: check its log and its disk",
        )
    return Diagnosis("persistence", log)


def _clock(fields: Mapping[str, str]) -> Iterator[Diagnosis]:
    now_us = _number(fields, "server_time_usec")
    if not now_us:  # servers before Redis 7 do not report it
        return
    skew_s = now_us / 1e6 - time.time()
    advice = (
        ""
        if abs(skew_s) < _CLOCK_SKEW_S
        else "synchronize both clocks with NTP, because pages expire by them"
    )
    yield Diagnosis(
        "clock", f"the server's clock differs from this machine's by {format_skew(skew_s)}", advice
    )


def _number(fields: Mapping[str, str], name: str) -> int:
    """Return a number from INFO, or 0 if the field is missing or not a number."""
    text = fields.get(name, "")
    return int(text) if NUMBER.fullmatch(text) else 0
