"""Helpers for tests that run replays: command lines, reports, and two processes over one store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from servers import wait_until

from hicache_storage.cli import main
from hicache_storage.replay.report import RequestCounts, Throughput, figures
from hicache_storage.replay.trace import Request, read_trace, synthetic_trace

_LIMIT_S = 100
POOL = {"shape": "mha,layers=1", "page_nbytes": 4096}
COMPLETE_PREFETCH = ("--hicache-storage-prefetch-policy", "wait_complete")
SWAP_FIGURES: dict[str, Any] = {
    "begun": True,
    "drained": True,
    "attached": True,
    "complaint": None,
    "took_s": 1.0,
    "backend": "redis",
    "after_requests": 3,
    "store": {},
    "storage": {},
}
"""Figures of a swap that worked well."""


def replay_args(backend: str, config: Mapping[str, Any], *argv: str) -> list[str]:
    """Return the arguments of `hicache` for a replay over `backend`."""
    return [
        *("replay", "--hicache-storage-backend", backend),
        *("--hicache-storage-backend-extra-config", json.dumps(dict(config)), *argv),
    ]


def replay_command(backend: str, config: Mapping[str, Any], *argv: str) -> list[str]:
    """Return the command line of a replay that prefetches every page of L3, however long that takes."""
    patient = {**config, "prefetch_threshold": 0}
    return [
        *(sys.executable, "-m", "hicache_storage.cli"),
        *replay_args(backend, patient, *COMPLETE_PREFETCH, *argv),
    ]


def reported(file: Path, argv: list[str]) -> dict[str, Any]:
    """Run `hicache` in this process and return the report that it writes to `file`."""
    assert main([*argv, "--json", str(file)]) == 0
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def hits(report: dict[str, Any], unit: str = "pages") -> int:
    """Return the hits of both tiers, in `unit`."""
    found: int = report[unit]["l2_hits"] + report[unit]["l3_hits"]
    return found


def trace_flags(real: tuple[str, ...], synthetic: tuple[str, ...]) -> tuple[str, ...]:
    """Return the trace that HICACHE_TRACE names, with flags `real`, or else a synthetic one."""
    named = os.environ.get("HICACHE_TRACE")
    return ("--trace", named, *real) if named else synthetic


def trace_of(limit: int, *, conversations: int) -> list[Request]:
    """Return the start of the trace that HICACHE_TRACE names, or else a synthetic one."""
    named = os.environ.get("HICACHE_TRACE")
    if named:
        return read_trace(Path(named), limit)
    return synthetic_trace(0, conversations=conversations)


def report_of(counts: RequestCounts, **counters: int) -> dict[str, Any]:
    """Return the report of a run with two pools, whose controller has these counters."""
    return {
        "pools": [POOL | {"name": "kv"}, POOL | {"name": "draft"}],
        "trace_requests": 9,
        "scale_bytes": 1.0,
        "left_pages": 0,
        "page_tokens": 64,
        "elapsed_s": 1.25,
        "interrupted": True,
        **figures(
            counts,
            page_tokens=64,
            read=Throughput(nbytes=3_000_000_000, busy_s=1.5),
            write=Throughput(nbytes=0, busy_s=0.0),
            controller=counters,
            store={"load_corrupt": 2, "load_miss": 0},
            storage={},
        ),
    }


def assert_shared(
    backend: str, config: Mapping[str, Any], scratch: Path, has_pages: Callable[[], bool]
) -> None:
    """Assert that a process finds the target and draft pages that only another process has stored.

    Both processes replay one trace. The second one starts when `has_pages` returns True.
    """
    reports = [scratch / f"{number}.json" for number in range(2)]
    trace = trace_flags(
        ("--requests", "60", "--speed", "12"), ("--conversations", "20", "--speed", "100")
    )
    flags = ("--keep", "--scale-bytes", "1/1024", "--host-size", "2MiB")
    command = replay_command(backend, config, *flags, *trace)
    first = subprocess.Popen([*command, "--json", str(reports[0])], stdout=subprocess.DEVNULL)
    wait_until(has_pages)
    second = subprocess.Popen([*command, "--json", str(reports[1])], stdout=subprocess.DEVNULL)
    assert first.poll() is None, "the first has ended before the second began"
    assert (0, 0) == (first.wait(_LIMIT_S), second.wait(_LIMIT_S))

    both: list[dict[str, Any]] = [json.loads(report.read_text()) for report in reports]
    for report in both:
        assert 0 == report["corrupt_pages"]
        assert report["requests"] == report["trace_requests"]
        assert report["pages"]["l3_hits"] > 0
        assert hits(report) == report["paired_pages"]
    assert hits(both[1], "blocks") > both[1]["blocks"]["ideal_hits"]
