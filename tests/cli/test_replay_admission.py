"""`hicache replay` with rules for writes: what they save, what they cost, and that both repeat."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from replays import COMPLETE_PREFETCH, hits, replay_args, reported

from hicache_storage.cli import main
from hicache_storage.page_store.admission import NOT_ADMITTED_FIRST_USE, NOT_ADMITTED_RATE

if TYPE_CHECKING:
    from pathlib import Path

_REPLAY = replay_args(
    "memory",
    {"prefetch_threshold": 0},
    *COMPLETE_PREFETCH,
    *("--scale-bytes", "1/1024", "--host-size", "3MiB", "--conversations", "20"),
)
_SECOND_USE = ("--second-use",)
_RATE = ("--write-rate", "20KiB", "--write-burst", "1MiB")


def _figures(tmp_path: Path, *argv: str) -> dict[str, Any]:
    return reported(tmp_path / "report.json", [*_REPLAY, *argv])


def _written(report: dict[str, Any]) -> int:
    pages: int = report["controller"]["written_pages"]
    return pages


def test_second_use_writes_less_and_finds_less(tmp_path: Path) -> None:
    plain, second = _figures(tmp_path), _figures(tmp_path, *_SECOND_USE)

    assert 0 < _written(second) < _written(plain)
    assert 0 < second["pages"]["l3_hits"] < plain["pages"]["l3_hits"]
    assert hits(second) < hits(plain)
    assert second["controller"][NOT_ADMITTED_FIRST_USE] >= _written(plain)
    assert 0 == second["corrupt_pages"] == second["unsaved_pages"]["total"]


def test_a_rate_writes_less(tmp_path: Path) -> None:
    plain, limited = _figures(tmp_path), _figures(tmp_path, *_RATE)

    assert 0 < _written(limited) < _written(plain)
    assert limited["controller"][NOT_ADMITTED_RATE] > 0
    assert hits(limited) < hits(plain)


@pytest.mark.parametrize("rules", [_SECOND_USE, _RATE, _SECOND_USE + _RATE], ids=len)
def test_hits_and_writes_do_not_depend_on_the_speed_of_the_machine(
    tmp_path: Path, rules: tuple[str, ...]
) -> None:
    names = ("missed_pages", "written_pages", NOT_ADMITTED_FIRST_USE, NOT_ADMITTED_RATE)
    first, again = (_figures(tmp_path, *rules)["controller"] for _ in range(2))

    assert [first.get(name) for name in names] == [again.get(name) for name in names]


def test_ranks_write_the_same_pages(tmp_path: Path) -> None:
    store = json.dumps({"path": str(tmp_path / "store"), "prefetch_threshold": 0})
    argv = [
        *("--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", store),
        *("--scale-bytes", "1", "--pool", "kv:mha,layers=2,heads=2,dim=4"),
        *("--ranks", "2", "--requests", "40"),
    ]
    report = _figures(tmp_path, *_SECOND_USE, *argv)
    first, second = report["ranks"]["written_pages"]

    assert abs(first - second) <= 2  # each rank may have the page of its own sketch in addition
    assert first > 100


def test_the_rules_are_in_the_report(tmp_path: Path) -> None:
    report = _figures(tmp_path, *_SECOND_USE, "--remembered-pages", "5000", *_RATE)

    assert {
        "second_use": True,
        "remembered_pages": 5000,
        "write_nbytes_per_s": 20 << 10,
        "write_burst_nbytes": 1 << 20,
    } == report["admission"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--remembered-pages", "5000"), "--remembered-pages is for --second-use"),
        (("--write-burst", "1MiB"), "--write-burst is for --write-rate"),
        (("--second-use", "--remembered-pages", "5"), "remembered_pages"),
        (("--write-rate", "0"), "write_nbytes_per_s"),
    ],
)
def test_flags_that_do_not_fit_are_named(
    argv: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert 2 == main([*_REPLAY, *argv])
    assert message in capfd.readouterr().err
