"""A replay over a Redis that restarts, behind a network that fails, gets no wrong page."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hicache_conformance import FaultProxy
from replays import replay_args, replay_command, trace_flags
from servers import RedisServer, wait_until

_LIMIT_S = 200
_PAUSE_S = 0.15
_STARTED_NBYTES = 4 << 20
_RESTARTS = (2.0, 5.0)


def _command(address: tuple[str, int], report: Path) -> list[str]:
    config = {"url": f"redis://127.0.0.1:{address[1]}", "timeout_s": 1.0}
    trace = trace_flags(
        ("--requests", "250", "--speed", "8"), ("--conversations", "100", "--speed", "90")
    )
    return replay_command(
        "redis",
        config,
        *("--scale-bytes", "1/256", "--host-size", "16MiB", "--json", str(report), *trace),
    )


def _faults(proxy: FaultProxy) -> list[Callable[[], None]]:
    """Return the network faults, one after another. Between two faults the network works."""
    return [
        partial(proxy.reset_after, 5_000),
        partial(proxy.truncate_after, 20_000),
        partial(proxy.reset_after, 60_000, direction="down"),
        partial(proxy.delay, 0.02),
        proxy.go_silent,
        partial(proxy.drip, 200_000),
        partial(proxy.reset_after, 3),
        partial(proxy.truncate_after, 2),
    ]


def _inject_faults(process: subprocess.Popen[bytes], server: RedisServer, proxy: FaultProxy) -> int:
    """Inject faults until the replay ends, restart the server twice, and return the number of faults."""
    wait_until(lambda: proxy.bytes_up > _STARTED_NBYTES)
    start_s, restarts = time.monotonic(), list(_RESTARTS)
    for faults, fault in enumerate(itertools.cycle(_faults(proxy)), start=1):
        fault()
        if _has_ended(process):
            return faults
        proxy.pass_through()
        if restarts and time.monotonic() - start_s > restarts[0]:
            restarts.pop(0)
            server.stop()
            server.start()
        if _has_ended(process):
            return faults
        assert time.monotonic() - start_s < _LIMIT_S
    raise AssertionError


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_PAUSE_S)
    except subprocess.TimeoutExpired:
        return False
    return True


@pytest.mark.timeout(300)
def test_no_fault_makes_a_page_wrong(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path / "server") as server,
        FaultProxy(("127.0.0.1", server.port)) as proxy,
        subprocess.Popen(
            _command(proxy.address, tmp_path / "report.json"), stdout=subprocess.DEVNULL
        ) as process,
    ):
        faults = _inject_faults(process, server, proxy)
        cuts = proxy.cuts

    assert 0 == process.returncode
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert 0 == report["corrupt_pages"]
    assert report["pages"]["l3_hits"] > 0
    assert report["requests"] == report["trace_requests"]
    assert faults > 10
    assert cuts > 0
    assert report["storage"]["failed_connections"] >= cuts / 2
    assert report["storage"]["settled_afterwards"] > 0
    assert report["store"]["save_ok"] + report["store"]["save_refused"] > 0


def _small_replay(server: RedisServer, tmp_path: Path, *argv: str) -> tuple[str, dict[str, Any]]:
    """Return the table and the figures of a short replay."""
    return _small_replay_of("redis", {"url": server.url}, tmp_path, *argv)


def _small_replay_of(
    backend: str, config: dict[str, Any], tmp_path: Path, *argv: str
) -> tuple[str, dict[str, Any]]:
    report = tmp_path / "report.json"
    flags = ("--scale-bytes", "1/256", "--host-size", "8MiB", "--json", str(report), *argv)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hicache_storage.cli"),
            *replay_args(backend, config, *flags),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    figures: dict[str, Any] = json.loads(report.read_text())
    return " ".join(done.stdout.split()), figures


def test_pages_that_a_full_redis_refuses_are_counted_with_the_reason(tmp_path: Path) -> None:
    options = ("--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
    with RedisServer(tmp_path / "server", *options) as server:
        table, report = _small_replay(server, tmp_path, "--requests", "60", "--evict")

    unsaved = report["unsaved_pages"]
    assert unsaved["refused"] > 0
    assert unsaved["total"] == (
        report["controller"]["unwritten_pages"] + report["dropped_write_pages"]
    )
    assert f"{unsaved['refused']:,} refused by the storage" in table
    assert report["notes"] == []


def test_a_run_faster_than_the_clock_of_redis_has_a_note(tmp_path: Path) -> None:
    options = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    with RedisServer(tmp_path / "server", *options) as server:
        table, _ = _small_replay(server, tmp_path, "--requests", "4")
        slower, _ = _small_replay(server, tmp_path, "--requests", "4", "--speed", "1000")

    assert "note Redis records the use of a page by the second (allkeys-lru)" in table
    assert "note" not in slower


def test_the_clock_of_a_redis_in_a_composition_has_the_same_note(tmp_path: Path) -> None:
    options = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    with RedisServer(tmp_path / "server", *options) as server:
        redis = {"name": "rack", "backend": "redis", "config": {"url": server.url}}
        tiers = [{"name": "ram", "backend": "memory"}, redis]
        table, _ = _small_replay_of("tiered", {"tiers": tiers}, tmp_path, "--requests", "4")

    assert "note Redis records the use of a page by the second (allkeys-lru)" in table
