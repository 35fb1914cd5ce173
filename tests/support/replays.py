"""Replays of one trace by two processes at once, over one store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_LIMIT_S = 100


def assert_shared(
    backend: str, config: Mapping[str, Any], scratch: Path, has_pages: Callable[[], bool]
) -> None:
    """Two processes replay a trace, target and draft; the second finds what only the first has stored.

    `has_pages`: whether the store has some by now.
    """
    reports = [scratch / f"{number}.json" for number in range(2)]
    command = _command(backend, config)
    first = subprocess.Popen([*command, "--json", str(reports[0])], stdout=subprocess.DEVNULL)
    wait_until(has_pages)
    second = subprocess.Popen([*command, "--json", str(reports[1])], stdout=subprocess.DEVNULL)
    assert first.poll() is None, "the first has ended before the second began"
    assert (0, 0) == (first.wait(_LIMIT_S), second.wait(_LIMIT_S))

    found: list[dict[str, Any]] = [json.loads(report.read_text()) for report in reports]
    for report in found:
        assert 0 == report["corrupt_pages"]
        assert report["requests"] == report["trace_requests"]
        assert report["pages"]["l3_hits"] > 0
        assert _hits(report, "pages") == report["paired_pages"]
    assert _hits(found[1], "blocks") > found[1]["blocks"]["ideal_hits"]


def _hits(report: dict[str, Any], kind: str) -> int:
    hits: int = report[kind]["l2_hits"] + report[kind]["l3_hits"]
    return hits


def _command(backend: str, config: Mapping[str, Any]) -> list[str]:
    named = os.environ.get("HICACHE_TRACE")
    if named:
        trace = ["--trace", named, "--requests", "60", "--speed", "12"]
    else:
        trace = ["--conversations", "20", "--speed", "100"]
    return [
        *(sys.executable, "-m", "hicache_storage.cli", "replay"),
        *("--hicache-storage-backend", backend),
        *(
            "--hicache-storage-backend-extra-config",
            json.dumps({**config, "prefetch_threshold": 0}),
        ),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--scale-bytes", "1/256", "--host-size", "8MiB", *trace),
    ]
