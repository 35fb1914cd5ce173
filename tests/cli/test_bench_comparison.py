"""The ratios of two runs, and the reports that can be compared."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hicache_storage.cli.operations.bench.comparison import TOLERANCES, compare, read_before
from hicache_storage.cli.operations.bench.run import FORMAT
from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def _load(**changes: object) -> dict[str, Any]:
    return {**_run()["loads"][0], **changes}


def _run(**figures: float | None) -> dict[str, Any]:
    read = {"pages_per_s": 100.0, "p50_s": 0.001, "p99_s": 0.002, "p999_s": 0.003}
    cpu = figures.pop("cpu_s_per_gb", 1.0)
    operations = {"read": {**read, **figures}}
    load = {"page_nbytes": 512, "threads": 2, "operations": operations, "cpu_s_per_gb": cpu}
    return {"loads": [load]}


def _worse(after: dict[str, Any]) -> list[str]:
    return [cell.metric for cell in compare(_run(), after, TOLERANCES) if cell.worse]


def test_equal_runs_have_ratios_of_one() -> None:
    assert {1.0} == {cell.ratio for cell in compare(_run(), _run(), TOLERANCES)}
    assert [] == _worse(_run())


@pytest.mark.parametrize(
    ("figures", "worse"),
    [
        ({"pages_per_s": 81.0}, []),
        ({"pages_per_s": 79.0}, ["throughput"]),
        ({"pages_per_s": 500.0}, []),
        ({"p50_s": 0.00124}, []),
        ({"p50_s": 0.00126}, ["p50"]),
        ({"p50_s": 0.0001}, []),
        ({"p99_s": 0.0031}, ["p99"]),
        ({"p999_s": 0.0059}, []),
        ({"p999_s": 0.0061}, ["p99.9"]),
        ({"cpu_s_per_gb": 1.3}, ["cpu"]),
        ({"pages_per_s": 0.0, "p50_s": None}, ["throughput", "p50"]),
    ],
)
def test_a_figure_beyond_its_tolerance_is_worse(
    figures: dict[str, float | None], worse: list[str]
) -> None:
    assert worse == _worse(_run(**figures))


def test_an_operation_that_is_gone_is_worse() -> None:
    after = _run()
    after["loads"][0]["operations"] = {}

    assert ["throughput", "p50", "p99", "p99.9"] == _worse(after)


def test_runs_without_a_common_load_are_refused() -> None:
    after = _run()
    after["loads"][0]["threads"] = 3

    with pytest.raises(ConfigError, match="share no page size"):
        compare(_run(), after, TOLERANCES)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "is no report"),
        ('{"loads": []}', "is no report"),
        ('{"format": 9, "loads": [], "settings": {}}', "another version"),
        (f'{{"format": {FORMAT}, "loads": [], "settings": []}}', "is no report"),
        (f'{{"format": {FORMAT}, "loads": 5, "settings": {{}}}}', "is no report"),
        (f'{{"format": {FORMAT}, "loads": [7], "settings": {{}}}}', "is no whole report"),
        *(
            (
                json.dumps({"format": FORMAT, "settings": {}, "loads": [_load(**wrong)]}),
                "is no whole report",
            )
            for wrong in (
                {"operations": None},
                {"operations": {"read": {"p50_s": 1}}},
                {"threads": "2"},
                {"cpu_s_per_gb": "1"},
                {"cpu_s_per_gb": 10**400},
                {"cpu_s_per_gb": float("nan")},
            )
        ),
    ],
)
def test_a_file_that_is_no_report_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=reason):
        read_before(path)


def test_a_whole_report_is_read(tmp_path: Path) -> None:
    report: dict[str, Any] = {"format": FORMAT, "settings": {}, "loads": [_load(cpu_s_per_gb=None)]}
    path = tmp_path / "before.json"
    path.write_text(json.dumps(report))

    assert report == read_before(path)
