"""The plan predicts the hits that a replay measures, over the real controller and the backend `file`."""

from __future__ import annotations

from pathlib import Path

import pytest
from replays import COMPLETE_PREFETCH, replay_args, reported

_TRACE = ("--conversations", "150", "--seed", "1")
_CACHE = (
    *("--pool", "kv:mha,layers=2,heads=1,dim=2", "--pool", "draft:mha,layers=1,heads=1,dim=1"),
    *("--page-size", "512", "--scale-bytes", "1"),
)
_PAGE_NBYTES = 10 * 1024
_FRAMES_NBYTES = 2 * 128
_TRAILERS_NBYTES = 2 * 64
_HALF_A_POINT = 0.005


@pytest.mark.parametrize(
    ("policy", "host_blocks", "storage_blocks"),
    [
        ("write_through", 300, 500),
        ("write_through", 400, 1000),
        ("write_through", 600, 1500),
        ("write_through_selective", 300, 800),
    ],
)
def test_both_tiers_hit_what_the_plan_says(
    tmp_path: Path, policy: str, host_blocks: int, storage_blocks: int
) -> None:
    stored = storage_blocks * (_PAGE_NBYTES + _FRAMES_NBYTES)
    capacity = stored + storage_blocks * _TRAILERS_NBYTES
    flags = (
        *(*_TRACE, *_CACHE, "--hicache-write-policy", policy),
        *("--host-size", str(host_blocks * _PAGE_NBYTES)),
    )
    store = {"path": str(tmp_path / "pages"), "capacity_nbytes": capacity}

    plan = reported(tmp_path / "plan.json", ["plan", *flags, "--storage-size", str(stored)])
    replay = reported(
        tmp_path / "replay.json", replay_args("file", store, *COMPLETE_PREFETCH, *flags)
    )

    (option,) = plan["options"]
    blocks = replay["blocks"]
    assert host_blocks == replay["host_pages"]
    assert plan["blocks"]["total"] == blocks["total"]
    assert plan["ideal_hit_rate"] == pytest.approx(blocks["ideal_hit_rate"])
    for tier in ("l2", "l3"):
        measured = blocks[f"{tier}_hits"] / blocks["total"]
        assert measured == pytest.approx(option[f"{tier}_hit_rate"], abs=_HALF_A_POINT)
    assert option["written_pages"] == pytest.approx(replay["controller"]["written_pages"], rel=0.02)
