"""Replays over `hf3fs`: target and draft pages, from two processes at once."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def test_two_processes_share_target_and_draft_pages(tmp_path: Path) -> None:
    """Each finds at least what one would find alone, and not a byte is wrong."""
    reports = [tmp_path / f"{number}.json" for number in range(2)]
    config = json.dumps({"path": str(tmp_path / "store"), "prefetch_threshold": 0})
    command = [
        *(sys.executable, "-m", "hicache_storage.cli", "replay"),
        *("--hicache-storage-backend", "hf3fs"),
        *("--hicache-storage-backend-extra-config", config),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--conversations", "20", "--scale-bytes", "1/256", "--host-size", "8MiB"),
    ]
    replays = [
        subprocess.Popen([*command, "--json", str(report)], stdout=subprocess.DEVNULL)
        for report in reports
    ]

    assert [0, 0] == [replay.wait(100) for replay in replays]
    for report in reports:
        found: dict[str, Any] = json.loads(report.read_text())
        assert 0 == found["corrupt_pages"]
        assert found["pages"]["l3_hits"] > 0
        assert (
            found["blocks"]["l2_hits"] + found["blocks"]["l3_hits"]
            >= (found["blocks"]["ideal_hits"])
        )
        assert found["paired_pages"] == found["pages"]["l2_hits"] + found["pages"]["l3_hits"]
