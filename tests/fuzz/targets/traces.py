"""Traces: a file is refused with a ConfigError, or its requests are in order and fit a plan."""

from __future__ import annotations

import gzip
import json
import math

from fuzz.choices import Choices
from fuzz.scratch import directory, write

from hicache_storage.errors import ConfigError
from hicache_storage.planning.plan import make_plan
from hicache_storage.planning.settings import PlanSettings
from hicache_storage.replay.models import PRESETS
from hicache_storage.replay.trace import BLOCK_TOKENS, Request, read_trace

_LONGEST_PLAN_S = 1e5
_SETTINGS = PlanSettings(
    model="m",
    pools=PRESETS["llama-3.1-8b"].pools,
    host_sizes=(1 << 32,),
    storage_sizes=(0, 1 << 40),
)


def _line(at_ms: object, tokens: int, *blocks: int) -> bytes:
    fields = {"timestamp": at_ms, "input_length": tokens, "output_length": 7, "hash_ids": blocks}
    return json.dumps(fields).encode() + b"\n"


_TRACE = _line(0, 600, 1, 2) + _line(1.5, 512, 1) + b"\n" + _line(30_000, 1024, 1, 3)

SEEDS = (
    b"",
    *(bytes([kind, limit]) + _TRACE for kind in range(4) for limit in (0, 2)),
    b"\2\0" + _line(10**400, 512, 1),
    b"\2\0" + _line(5, 512, 2**54 - 1) + _line(4, 512, 0),
    b"\2\0" + b"[" * 3000,
    b"\2\0\x1f\x8b",
)
TOKENS = (
    *(b'"timestamp"', b'"input_length"', b'"output_length"', b'"hash_ids"', b"1e999", b"NaN"),
    *(b"9" * 400, b"null", b"true", b"18014398509481983", b"18014398509481984", b"\n", b"\x1f\x8b"),
)


def check(data: bytes) -> None:
    choices = Choices(data)
    kind, limit = choices.integer(0, 3), choices.integer(0, 3) or None
    content = choices.rest()
    if kind == 1:
        content = choices.patched(gzip.compress(content, 1, mtime=0))
    path = directory("traces") / "trace.jsonl"
    write(str(path), content)
    try:
        requests = read_trace(path, limit)
    except ConfigError as error:
        assert str(path) in str(error)
        return

    assert 0 < len(requests) <= (limit or len(requests))
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    for request in requests:
        assert 0 <= request.arrival_s < math.inf
        assert len(request.blocks) == -(-request.input_tokens // BLOCK_TOKENS)
        assert all(0 <= block < 2**54 for block in request.blocks)
    _check_again(requests)
    if kind == 3 and arrivals[-1] - arrivals[0] <= _LONGEST_PLAN_S:
        plan = make_plan(requests, _SETTINGS)
        assert plan["requests"] == len(requests)
        assert all(0 <= option["hit_rate"] <= 1 for option in plan["options"])
        json.dumps(plan, allow_nan=False)


def _check_again(requests: list[Request]) -> None:
    """Write the requests as a trace, and assert that reading it gives the same requests."""
    path = directory("traces") / "again.jsonl"
    lines = [
        _line(number, request.input_tokens, *request.blocks)
        for number, request in enumerate(requests)
    ]
    write(str(path), b"".join(lines))
    again = read_trace(path)
    assert [(each.input_tokens, each.blocks) for each in requests] == [
        (each.input_tokens, each.blocks) for each in again
    ]
