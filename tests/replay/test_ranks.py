"""Replays by several ranks, each a process: one report, no wrong byte, and an end when one dies."""

from __future__ import annotations

import json
import multiprocessing
import signal
import threading
from copy import deepcopy
from os import _exit, kill
from typing import TYPE_CHECKING, Any

import pytest

from hicache_storage.cli import main
from hicache_storage.config import StorageChoice
from hicache_storage.controller import ControllerSettings, PrefetchPolicy
from hicache_storage.errors import HiCacheError
from hicache_storage.replay.disruptions import Trouble
from hicache_storage.replay.driver import ReplaySettings
from hicache_storage.replay.job import ReplayJob
from hicache_storage.replay.models import KVShape, PoolShape
from hicache_storage.replay.rank_report import combined
from hicache_storage.replay.ranks import _figures, _Rank, play_ranks
from hicache_storage.replay.trace import synthetic_trace
from hicache_storage.topology import Topology

if TYPE_CHECKING:
    from pathlib import Path

_FLAGS = ("--requests", "16", "--host-size", "2MiB", "--scale-bytes", "1/512")


def piece(tmp_path: Path, **changes: Any) -> ReplayJob:
    """A replay by two ranks over a directory: an MLA target with an MHA draft."""
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
        Trouble(),
        synthetic_trace(0, conversations=75, limit=24),
    )


def ranks_left() -> list[str]:
    """Names of ranks' processes that still run."""
    return [
        process.name for process in multiprocessing.active_children() if "rank-" in process.name
    ]


def signal_rank(number: int, what: int) -> None:
    """Send a signal to a rank that runs."""
    (pid,) = (
        process.pid
        for process in multiprocessing.active_children()
        if process.name == f"rank-{number}"
    )
    assert pid is not None
    kill(pid, what)


def reported(tmp_path: Path, *argv: str) -> dict[str, Any]:
    """What a run of the verb says, over one directory for all runs of a test."""
    file = tmp_path / "report.json"
    config = json.dumps({"path": str(tmp_path / "store")})
    store = ("--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", config)
    assert main(["replay", *store, *_FLAGS, "--json", str(file), *argv]) == 0
    report: dict[str, Any] = json.loads(file.read_text())
    return report


class TestRun:
    def test_all_pools_are_found_and_right_and_the_target_has_one_writer(
        self, tmp_path: Path
    ) -> None:
        report = play_ranks(piece(tmp_path), stop=threading.Event(), progress=lambda _: None)

        blocks = report["blocks"]
        assert blocks["l2_hits"] + blocks["l3_hits"] == blocks["ideal_hits"] > 0
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
        flags = ("--scale-bytes", "1/256", "--head-group", "2", *pools)
        assert reported(tmp_path, "--ranks", "2", *flags)["pages"]["misses"] > 0

        report = reported(tmp_path, *flags)
        assert (report["ranks"], report["pages"]["misses"], report["corrupt_pages"]) == (None, 0, 0)

    def test_a_stop_comes_after_the_same_request_on_every_rank(self, tmp_path: Path) -> None:
        stop = threading.Event()
        report = play_ranks(piece(tmp_path, speed=0.01), stop=stop, progress=lambda _: stop.set())

        assert 1 <= report["requests"] < 24
        assert report["corrupt_pages"] == 0


class TestFailure:
    def test_a_rank_that_dies_ends_the_run(self, tmp_path: Path) -> None:
        with pytest.raises(HiCacheError, match="rank 1 died, killed by SIGKILL: the run was ended"):
            play_ranks(
                piece(tmp_path, speed=0.01),
                stop=threading.Event(),
                progress=lambda _: signal_rank(1, signal.SIGKILL),
            )

        assert ranks_left() == []

    def test_a_rank_that_fails_says_why(self, tmp_path: Path) -> None:
        with pytest.raises(HiCacheError, match=r"rank \d failed: .*page_head.* MLA has none"):
            play_ranks(
                piece(tmp_path, layout="page_head"),
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
        assert "--ranks 2: pages of backend 'memory' cannot be seen" in capsys.readouterr().err

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


_PART: dict[str, Any] = {
    "elapsed_s": 1.0,
    "requests": 2,
    "blocks": {"l2_hits": 1, "l3_hits": 0},
    "pages": {"l2_hits": 8, "l3_hits": 0},
    "tokens": {"l2_hits": 512, "l3_hits": 0},
    "paired_pages": 8,
    "l3_read": {"nbytes": 100, "busy_s": 1.0},
    "l3_write": {"nbytes": 0, "busy_s": 0.0},
    "prefetch": {"p50_s": 0.1, "p99_s": None},
    "loaded_unused_pages": 1,
    "dropped_write_pages": 2,
    "unreserved_pages": 3,
    "verified_nbytes": 4,
    "corrupt_pages": 5,
    "controller": {"a": 1},
    "store": {"save_ok": 6, "load_ok": 7},
    "storage": {},
    "unsaved_pages": {"total": 3, "refused": 2, "dropped": 1},
    "drained": True,
    "pools": [{"name": "kv", "space": "a", "spaces": ["a"]}],
    "faults": None,
    "swap": None,
}


class TestReport:
    def two(self, **changes: Any) -> list[dict[str, Any]]:
        """Figures of two ranks, the second with `changes`."""
        return [deepcopy(_PART), {**deepcopy(_PART), **changes}]

    def test_what_ranks_did_is_added_up(self) -> None:
        report = combined(self.two(store={"save_ok": 1, "healed": 1}, corrupt_pages=0))

        assert report["corrupt_pages"] == 5
        assert report["verified_nbytes"] == 8
        assert report["store"] == {"healed": 1, "load_ok": 7, "save_ok": 7}
        assert report["ranks"] == {"size": 2, "written_pages": [6, 1], "loaded_pages": [7, 0]}

    def test_pages_that_were_not_stored_are_added_up_by_reason(self) -> None:
        report = combined(self.two(unsaved_pages={"total": 4, "timeout": 4}, drained=False))

        expected = {"total": 7, "dropped": 1, "refused": 2, "timeout": 4}
        assert (expected, False) == (report["unsaved_pages"], report["drained"])

    def test_key_spaces_of_all_ranks_are_named(self) -> None:
        other = [{"name": "kv", "space": "b", "spaces": ["b", "a"]}]

        assert combined(self.two(pools=other))["pools"][0]["spaces"] == ["a", "b"]

    def test_pages_written_after_a_swap_count_as_written(self) -> None:
        swap = {
            "begun": True,
            "drained": True,
            "attached": True,
            "complaint": None,
            "took_s": 1.0,
            "backend": "redis",
            "after_requests": 3,
            "store": {"save_ok": 10},
            "storage": {},
        }
        report = combined([{**deepcopy(_PART), "swap": swap}, {**deepcopy(_PART), "swap": swap}])

        assert report["ranks"]["written_pages"] == [16, 16]

    def test_bandwidth_is_of_all_bytes_in_the_longest_time(self) -> None:
        report = combined(self.two(l3_read={"nbytes": 300, "busy_s": 4.0}))

        assert report["l3_read"] == {"nbytes": 400, "busy_s": 4.0, "gb_per_s": 1e-7}

    def test_what_one_rank_loaded_was_found_in_l3(self) -> None:
        report = combined(self.two(pages={"l2_hits": 3, "l3_hits": 5}))

        assert report["pages"] == {"l2_hits": 3, "l3_hits": 5}

    def test_ranks_that_found_different_prefixes_are_an_error(self) -> None:
        with pytest.raises(HiCacheError, match=r"different lengths: \[8, 7\] pages"):
            combined(self.two(pages={"l2_hits": 7, "l3_hits": 0}))

    def test_faults_and_swaps_are_added_up(self) -> None:
        swap = {
            "begun": True,
            "drained": True,
            "attached": True,
            "complaint": None,
            "took_s": 1.0,
            "backend": "redis",
            "after_requests": 3,
            "store": {"x": 1},
            "storage": {},
        }
        first = {**deepcopy(_PART), "swap": swap, "faults": {"plan": "p", "struck": {"a": 1}}}
        second = {**deepcopy(first), "swap": {**swap, "attached": False, "complaint": "down"}}
        report = combined([first, second])

        assert report["faults"] == {"plan": "p", "struck": {"a": 2}}
        assert (report["swap"]["attached"], report["swap"]["complaint"]) == (False, "down")
        assert report["swap"]["store"] == {"x": 2}


def test_a_rank_that_dies_as_the_run_is_stopped_is_told_of() -> None:
    """The word to stop cannot be passed on to it any more."""
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
