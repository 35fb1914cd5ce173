"""Compare two runs of `hicache bench`: the ratio of each figure, and the figures that are worse."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from hicache_storage.cli.operations.bench.run import FORMAT
from hicache_storage.cli.sizes import counted
from hicache_storage.errors import ConfigError, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

METRICS = {
    "throughput": ("pages_per_s", True),
    "p50": ("p50_s", False),
    "p99": ("p99_s", False),
    "p99.9": ("p999_s", False),
}
"""The figures of an operation by name: the field in a report, and True if higher is better."""
CPU = "cpu"
"""The processor time for each GB of a load. Lower is better."""
TOLERANCES = {"throughput": 0.25, "p50": 0.25, "p99": 0.5, "p99.9": 1.0, CPU: 0.25}
"""The share by which each figure may become worse."""
_MOST = 1e15


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure in two runs, and how it changed."""

    page_nbytes: int
    threads: int
    operation: str
    """The operation. Empty for a figure of the whole load."""
    metric: str
    ratio: float | None
    """After / before. None: only the earlier run has this figure."""
    worse: bool

    def as_json(self) -> dict[str, Any]:
        """Return the fields."""
        return {**asdict(self), "operation": self.operation or None}


def read_before(path: Path) -> dict[str, Any]:
    """Read the report that an earlier run wrote with `--json`.

    Raises:
        ConfigError: The file cannot be read, or is not such a report.
    """
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--compare {shown(path)}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"--compare {shown(path)}: is not JSON") from None
    report = _fields(found)
    loads: Any = report.get("loads")
    if not isinstance(report.get("settings"), dict) or not isinstance(loads, list):
        raise ConfigError(f"--compare {shown(path)}: is not a report of hicache bench --json")
    if report.get("format") != FORMAT:
        raise ConfigError(f"--compare {shown(path)}: is from another version of hicache bench")
    wanted: list[Any] = cast("Any", loads)
    if not all(map(_is_load, wanted)):
        raise ConfigError(f"--compare {shown(path)}: is not a whole report of hicache bench --json")
    return report


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of an object. Empty for anything else."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _is_load(value: Any) -> bool:
    load = _fields(value)
    operations = _fields(load.get("operations")).values()
    return (
        all(isinstance(load.get(name), int) for name in ("page_nbytes", "threads"))
        and isinstance(load.get("operations"), dict)
        and _is_figure(load.get("cpu_s_per_gb", load))
        and all(
            _is_figure(_fields(figures).get(field, field))
            for figures in operations
            for field, _ in METRICS.values()
        )
    )


def _is_figure(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and 0 <= value <= _MOST
    return value is None or is_number


def check_comparable(before: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse to compare runs with different loads.

    Raises:
        ConfigError: The message names the first setting that differs.
    """
    for name, value in settings.items():
        if (old := before["settings"].get(name)) != value:
            raise ConfigError(
                f"--compare: {name} was {shown(old)} in the earlier run, but is {value} now: use"
                " the same settings"
            )


def compare(
    before: Mapping[str, Any], after: Mapping[str, Any], tolerances: Mapping[str, float]
) -> list[Cell]:
    """Return the figures of the loads that both runs have.

    Raises:
        ConfigError: The runs have no load in common.
    """
    old = {_key(load): load for load in before["loads"]}
    cells = [
        cell
        for load in after["loads"]
        if _key(load) in old
        for cell in _load_cells(old[_key(load)], load, tolerances)
    ]
    if after["loads"] and not cells:
        raise ConfigError(
            "--compare: no page size was measured with the same number of threads in both runs"
        )
    return cells


def ratios_to_first_part(report: Mapping[str, Any]) -> list[Cell]:
    """Return the figures of a composed store relative to those of its first part. [] for a plain one."""
    alone = report.get("first_part")
    if not alone or not (alone["loads"] and report["loads"]):
        return []
    return compare(alone, report, dict.fromkeys(TOLERANCES, math.inf))


def worse_problems(cells: Sequence[Cell]) -> list[str]:
    """Return a sentence that counts the figures that are worse, or an empty list if none is."""
    worse = sum(cell.worse for cell in cells)
    return [f"worse than tolerated: {worse} of {counted(len(cells), 'figure')}"] if worse else []


def _load_cells(
    old: Mapping[str, Any], new: Mapping[str, Any], tolerances: Mapping[str, float]
) -> Iterator[Cell]:
    for operation, figures in old["operations"].items():
        found = new["operations"].get(operation, {})
        for metric, (field, more_is_better) in METRICS.items():
            values = figures[field], found.get(field)
            yield from _cell(new, operation, metric, values, tolerances, better=more_is_better)
    values = old["cpu_s_per_gb"], new["cpu_s_per_gb"]
    yield from _cell(new, "", CPU, values, tolerances, better=False)


def _cell(
    load: Mapping[str, Any],
    operation: str,
    metric: str,
    values: tuple[float | None, float | None],
    tolerances: Mapping[str, float],
    *,
    better: bool,
) -> Iterator[Cell]:
    before, after = values
    if not before:  # nothing to compare with
        return
    ratio = after / before if after else None
    factor = 1 / ratio if ratio and better else ratio
    worse = factor is None or factor > 1 + tolerances[metric]
    yield Cell(load["page_nbytes"], load["threads"], operation, metric, ratio, worse)


def _key(load: Mapping[str, Any]) -> tuple[int, int]:
    return load["page_nbytes"], load["threads"]
