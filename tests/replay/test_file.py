"""Replays over the file backend: a kill loses no stored page, and the real trace is replayed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from replays import hits, replay_command, trace_of

from hicache_storage.keys import page_hashes
from hicache_storage.registry import open_storage
from hicache_storage.replay.trace import Request, block_tokens

_PAGE_TOKENS = 64

needs_trace = pytest.mark.skipif(
    "HICACHE_TRACE" not in os.environ, reason="HICACHE_TRACE names no trace"
)


def _replayed(store: Path, *argv: str) -> dict[str, Any]:
    file = store.parent / "report.json"
    command = replay_command("file", {"path": str(store)}, *argv, "--json", str(file))
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    report: dict[str, Any] = json.loads(file.read_text())
    return report


@pytest.fixture
def memory_directory(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory on tmpfs, because a disk would be slow, or `tmp_path` if there is no tmpfs."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    path = Path("/dev/shm") / f"hicache-{os.getpid()}-{tmp_path.name}"
    path.mkdir()
    yield path
    shutil.rmtree(path, ignore_errors=True)


def _write_trace(path: Path, requests: Iterable[Request]) -> Path:
    lines = (
        {
            "timestamp": round(1000 * request.arrival_s),
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": request.blocks,
        }
        for request in requests
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _stored(store: Path) -> set[str]:
    """Return the hashes of the pages that the store has in every pool."""
    with open_storage("file", {"path": str(store)}) as storage:
        pools = [{info.page_hash for info in storage.scan(space)} for space in storage.spaces()]
    assert len(pools) == 2
    return pools[0] & pools[1]


def _possible_hits(requests: Iterable[Request], known: set[str]) -> int:
    """Return the hits of a cache that starts with the pages in `known` and evicts nothing."""
    hits = 0
    for request in requests:
        hashes = page_hashes(block_tokens(request.blocks), _PAGE_TOKENS)
        new = (n for n, page_hash in enumerate(hashes) if page_hash not in known)
        hits += next(new, len(hashes))
        known.update(hashes)
    return hits


def _killed_mid_run(store: Path, argv: list[str], *, after_pages: int) -> None:
    command = replay_command("file", {"path": str(store)}, *argv)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        deadline_s = time.monotonic() + 60
        while len(list(store.glob("spaces/*/*/*"))) < after_pages:
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)  # counting the files takes long, too
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def test_pages_stored_before_a_kill_are_found(tmp_path: Path) -> None:
    requests, store = trace_of(60, conversations=40), tmp_path / "store"
    argv = [
        *("--trace", str(_write_trace(tmp_path / "t.jsonl", requests))),
        *("--scale-bytes", "1/1024", "--host-size", "10MiB"),
    ]
    _killed_mid_run(store, argv, after_pages=800)
    stored = _stored(store)
    assert stored

    report = _replayed(store, *argv)

    assert hits(report) == _possible_hits(requests, stored)
    assert report["pages"]["l3_hits"] > 0
    assert report["corrupt_pages"] == 0


def _replayed_trace(store: Path, host_size: str, *argv: str) -> dict[str, Any]:
    """Replay the trace that HICACHE_TRACE names with an L2 that is smaller than its pages."""
    return _replayed(
        store,
        *("--trace", os.environ["HICACHE_TRACE"], "--page-size", "512"),
        *("--scale-bytes", "1/8192", "--host-size", host_size, *argv),
    )


@pytest.mark.no_cover
@needs_trace
def test_the_start_of_a_trace_gives_the_ideal_hit_rate(memory_directory: Path) -> None:
    report = _replayed_trace(memory_directory / "store", "16MiB", "--requests", "700")

    assert report["requests"] == 700
    assert report["blocks"]["ideal_hits"] > 3000
    assert report["blocks"]["l3_hits"] > 0
    assert hits(report, "blocks") == report["blocks"]["ideal_hits"] == report["paired_pages"]
    assert report["corrupt_pages"] == 0


@pytest.mark.long
@pytest.mark.timeout(600)
@needs_trace
def test_the_whole_trace_gives_the_ideal_hit_rate(memory_directory: Path) -> None:
    report = _replayed_trace(memory_directory / "store", "128MiB")

    assert report["requests"] == 12_031
    assert report["blocks"]["ideal_hits"] == 105_710
    assert hits(report, "blocks") == 105_710
    assert report["blocks"]["hit_rate"] == pytest.approx(0.366, abs=0.0005)
    assert report["paired_pages"] == 105_710
    assert report["corrupt_pages"] == 0
