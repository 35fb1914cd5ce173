"""`hicache replay --tracing`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replays import COMPLETE_PREFETCH, replay_args, reported
from spans import Spans, is_child

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

_REPLAY = replay_args(
    "memory",
    {"prefetch_threshold": 0},
    *COMPLETE_PREFETCH,
    *("--scale-bytes", "1/1024", "--host-size", "1MiB", "--conversations", "5"),
)


def test_each_request_is_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans.of_process(monkeypatch)

    report = reported(tmp_path / "report.json", [*_REPLAY, "--tracing"])

    prefetches = spans.named("hicache.prefetch")
    loads = spans.named("hicache.load")
    assert report["requests"] == len(prefetches)
    assert loads
    assert all(any(is_child(load, of) for of in prefetches) for load in loads)
    assert report["store"]["load_nbytes"] == sum(
        int(str((load.attributes or {})["hicache.nbytes"])) for load in loads
    )


def test_there_are_no_spans_without_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = Spans.of_process(monkeypatch)

    reported(tmp_path / "report.json", _REPLAY)

    assert [] == spans.named("hicache.prefetch")


def test_spans_that_go_nowhere_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reported(tmp_path / "report.json", [*_REPLAY, "--tracing"])

    assert "hicache: warning: --tracing: spans go nowhere" in capsys.readouterr().err


def test_spans_of_a_provider_are_no_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Spans.of_process(monkeypatch)

    reported(tmp_path / "report.json", [*_REPLAY, "--tracing"])

    assert "--tracing" not in capsys.readouterr().err
