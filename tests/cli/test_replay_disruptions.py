"""`hicache replay` with faults and with an exchange of backends: reports and refusals."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from replays import reported

from hicache_storage.cli import main

if TYPE_CHECKING:
    from pathlib import Path

_REPLAY = [
    *("replay", "--hicache-storage-backend", "memory", "--conversations", "14"),
    *("--scale-bytes", "1/1024", "--host-size", "2MiB"),
]
_PLAN = (
    "exists:raise@2%,exists:lie@5%,exists:miss@5%,get:raise@2%,get:miss@5%,get:lie@5%,get:tear@5%,"
    "get:flip@5%,get:delay@5%,get:hang@1%,set:raise@2%,set:miss@5%,set:lie@5%,set:tear@5%,set:flip@5%,"
    "delete:raise@20%,seed=3,delay_s=0.001,hang_s=0.2"
)


def _report(tmp_path: Path, *argv: str) -> dict[str, Any]:
    return reported(tmp_path / "report.json", [*_REPLAY, *argv])


def test_no_fault_of_any_kind_makes_a_byte_wrong(tmp_path: Path) -> None:
    report = _report(tmp_path, "--faults", _PLAN)

    assert report["corrupt_pages"] == 0
    assert report["requests"] == report["trace_requests"]
    assert report["pages"]["l3_hits"] > 0
    assert report["faults"]["plan"] == _PLAN
    assert sum(report["faults"]["struck"].values()) > 20


def test_wrong_pages_are_reported_where_nothing_checks_them(tmp_path: Path) -> None:
    """The faults are real: without checksums they reach the engine."""
    file = tmp_path / "report.json"
    argv = ["--faults", "get:flip@100%", "--checksum", "none", "--json", str(file)]

    assert main([*_REPLAY, *argv]) == 1
    assert json.loads(file.read_text())["corrupt_pages"] > 0


def test_a_report_without_disruptions_has_none(tmp_path: Path) -> None:
    report = _report(tmp_path)

    assert report["faults"] is None
    assert report["swap"] is None


def test_a_faulty_backend_is_exchanged_for_a_directory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = json.dumps({"path": str(tmp_path / "store")})
    report = _report(
        tmp_path,
        *("--swap-backend", "file", "--swap-extra-config", config, "--swap-after", "12", "--keep"),
        *("--faults", "get:raise@10%,set:flip@10%,seed=1"),
    )

    assert report["corrupt_pages"] == 0
    assert report["swap"]["backend"] == "file"
    assert report["swap"]["after_requests"] == 12
    assert report["swap"]["attached"]
    assert report["swap"]["store"]["load_ok"] > 0
    assert list((tmp_path / "store").glob("spaces/*/*/*"))
    assert "to file after 12 requests" in capfd.readouterr().out


def test_the_exchange_is_half_way_by_default(tmp_path: Path) -> None:
    report = _report(tmp_path, "--swap-backend", "memory")

    assert report["swap"]["after_requests"] == report["trace_requests"] // 2


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--faults", "get:rise@5%"], "unknown fault 'rise'"),
        (["--swap-after", "3"], "--swap-after needs --swap-backend"),
        (["--swap-extra-config", "{}"], "--swap-extra-config needs --swap-backend"),
        (["--swap-backend", "memory", "--swap-after", "100000"], "give fewer"),
        (["--swap-backend", "memroy"], "did you mean 'memory'"),
        (["--swap-backend", "memory", "--swap-extra-config", '{"a": 1}'], "unknown field 'a'"),
    ],
)
def test_invalid_flags_are_refused(
    argv: list[str], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*_REPLAY, *argv]) == 2
    assert reason in capfd.readouterr().err
