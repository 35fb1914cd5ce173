"""Replays by several rank processes: one report, no wrong byte, and an end if a rank dies."""

from __future__ import annotations

import json
import multiprocessing
import signal
import threading
from os import _exit, kill
from pathlib import Path
from typing import Any

import pytest
from replays import hits, replay_args, reported

from hicache_storage.cli import main
from hicache_storage.config import StorageChoice
from hicache_storage.controller import ControllerSettings, PrefetchPolicy
from hicache_storage.errors import HiCacheError
from hicache_storage.replay.disruptions import Disruptions
from hicache_storage.replay.driver import ReplaySettings
from hicache_storage.replay.job import ReplayJob
from hicache_storage.replay.models import KVShape, PoolShape
from hicache_storage.replay.ranks import _figures, _Rank, run_ranks
from hicache_storage.replay.trace import synthetic_trace
from hicache_storage.topology import Topology

_FLAGS = ("--requests", "16", "--host-size", "2MiB", "--scale-bytes", "1/512")


def job(tmp_path: Path, **changes: Any) -> ReplayJob:
    """Return a replay by two ranks over a directory, of an MLA target with an MHA draft."""
    settings: dict[str, Any] = {
        "model": "m",
        "pools": (
            PoolShape("kv", KVShape("mla", 2, 1, 4)),
            PoolShape("draft", KVShape("mha", 1, 2, 4)),
        ),
        "host_nbytes": 1 << 19,
        "topology": Topology(tp_size=2),
        "controller": ControllerSettings(
            prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, prefetch_threshold_tokens=0
        ),
        **changes,
    }
    return ReplayJob(
        StorageChoice(backend="file", config={"path": str(tmp_path / "store")}),
        ReplaySettings(**settings),
        Disruptions(),
        synthetic_trace(0, conversations=75, limit=24),
    )


def ranks_left() -> list[str]:
    """Return the names of the rank processes that still run."""
    return [
        process.name for process in multiprocessing.active_children() if "rank-" in process.name
    ]


def signal_rank(number: int, what: int) -> None:
    """Send signal `what` to a running rank."""
    (pid,) = (
        process.pid
        for process in multiprocessing.active_children()
        if process.name == f"rank-{number}"
    )
    assert pid is not None
    kill(pid, what)


def reported_by(tmp_path: Path, *argv: str) -> dict[str, Any]:
    """Return the report of a run. All runs of a test share one directory."""
    args = replay_args("file", {"path": str(tmp_path / "store")}, *_FLAGS, *argv)
    return reported(tmp_path / "report.json", args)


class TestRun:
    def test_all_pools_are_found_and_right_and_the_target_has_one_writer(
        self, tmp_path: Path
    ) -> None:
        report = run_ranks(job(tmp_path), stop=threading.Event(), progress=lambda _: None)

        blocks = report["blocks"]
        assert hits(report, "blocks") == blocks["ideal_hits"] > 0
        assert report["pages"]["l3_hits"] > 0
        assert report["corrupt_pages"] == 0
        assert report["requests"] == 24
        first, second = report["ranks"]["written_pages"]
        assert (first, second) == (2 * report["pages"]["misses"], report["pages"]["misses"])
        assert ranks_left() == []

    def test_another_number_of_ranks_finds_the_pages_in_groups_of_heads(
        self, tmp_path: Path
    ) -> None:
        pools = ("--pool", "kv:mha,layers=4,heads=4,dim=512", "--hicache-mem-layout", "page_head")
        patient = ("--hicache-storage-prefetch-policy", "wait_complete")
        flags = ("--scale-bytes", "1/256", "--head-group", "2", *pools, *patient)
        assert reported_by(tmp_path, "--ranks", "2", "--keep", *flags)["pages"]["misses"] > 0

        report = reported_by(tmp_path, *flags)
        assert (report["ranks"], report["pages"]["misses"], report["corrupt_pages"]) == (None, 0, 0)

    def test_a_stop_comes_after_the_same_request_on_every_rank(self, tmp_path: Path) -> None:
        stop = threading.Event()
        report = run_ranks(job(tmp_path, speed=0.01), stop=stop, progress=lambda _: stop.set())

        assert 1 <= report["requests"] < 24
        assert report["corrupt_pages"] == 0


class TestFailure:
    def test_a_rank_that_dies_ends_the_run(self, tmp_path: Path) -> None:
        with pytest.raises(HiCacheError, match="rank 1 died, killed by SIGKILL: the run was ended"):
            run_ranks(
                job(tmp_path, speed=0.01),
                stop=threading.Event(),
                progress=lambda _: signal_rank(1, signal.SIGKILL),
            )

        assert ranks_left() == []

    def test_a_failed_rank_reports_its_error(self, tmp_path: Path) -> None:
        with pytest.raises(HiCacheError, match=r"rank \d failed: .*page_head.* MLA has none"):
            run_ranks(
                job(tmp_path, layout="page_head"),
                stop=threading.Event(),
                progress=lambda _: None,
            )

    @pytest.mark.parametrize(("first", "second"), [("memory", "file"), ("file", "memory")])
    def test_storages_that_ranks_cannot_share_are_refused(
        self, tmp_path: Path, first: str, second: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        configs = {"memory": "{}", "file": json.dumps({"path": str(tmp_path)})}
        argv = [
            *("replay", *_FLAGS, "--ranks", "2"),
            *("--hicache-storage-backend", first),
            *("--hicache-storage-backend-extra-config", configs[first]),
            *("--swap-backend", second, "--swap-extra-config", configs[second]),
        ]

        assert main(argv) == 2
        assert "--ranks 2: other processes cannot see the pages" in capsys.readouterr().err

    def test_heads_that_the_ranks_cannot_share_are_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        argv = [
            *("replay", "--hicache-storage-backend", "file", *_FLAGS, "--ranks", "3"),
            *("--hicache-storage-backend-extra-config", json.dumps({"path": str(tmp_path)})),
            *("--pool", "kv:mha,layers=2,heads=8,dim=4096"),
        ]

        assert main(argv) == 2
        assert "tp_size 3 does not split 8 KV heads evenly" in capsys.readouterr().err


def test_a_rank_that_dies_during_a_stop_is_reported() -> None:
    """The message to stop can't be sent to the dead rank."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_exit, args=(3,))
    process.start()
    process.join(30)
    theirs.close()
    stop = threading.Event()
    stop.set()

    with ours, pytest.raises(HiCacheError, match="rank 0 died with exit code 3"):
        _figures([_Rank(0, process, ours)], stop, lambda _: None)
