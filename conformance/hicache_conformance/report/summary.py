"""The short form of a record: the outcome of each rule, and the names of the failed checks.

`docs/field` keeps records in this form, with about one line per rule. `python -m
hicache_conformance.report.summary result.json` prints it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from hicache_conformance.report.record import Record, RecordError, read_json
from hicache_conformance.run.outcomes import Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

SUMMARY_VERSION = 1


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StoreSummary(_Part):
    """The store that was judged."""

    name: str
    target: str
    """`module:Class`."""
    version: str


class RunSummary(_Part):
    """When and how the run was made."""

    started_at: datetime
    elapsed_s: float
    spec: str
    """The version of the rules."""
    kit: str
    """The version of the distribution that holds the kit."""
    python: str
    platform: str
    command: str


class RuleSummary(_Part):
    """One rule, with its number of checks by outcome."""

    id: str
    title: str
    outcome: Outcome
    checks: dict[Outcome, int]


class Summary(_Part):
    """One run of the kit on one store, in short."""

    summary_version: int = SUMMARY_VERSION
    store: StoreSummary
    run: RunSummary
    verdict: Verdict
    rules: tuple[RuleSummary, ...]
    failed_checks: tuple[str, ...]

    @classmethod
    def of(cls, record: Record) -> Self:
        """Return the summary of a record."""
        subject, run = record.subject, record.run
        return cls(
            store=StoreSummary(name=subject.name, target=subject.target, version=subject.version),
            run=RunSummary(**{name: getattr(run, name) for name in RunSummary.model_fields}),
            verdict=record.verdict,
            rules=tuple(
                RuleSummary(
                    id=rule.id,
                    title=rule.title,
                    outcome=rule.outcome,
                    checks=_counted(check.outcome for check in rule.checks),
                )
                for rule in record.rules
            ),
            failed_checks=tuple(
                check.name
                for rule in record.rules
                for check in rule.checks
                if check.outcome is Outcome.FAILED
            ),
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the summary in a file that holds a record or a summary.

        Raises:
            RecordError: The file cannot be read, or holds neither.
        """
        fields = read_json(path)
        if "summary_version" not in fields:
            return cls.of(Record.read(path))
        version = fields["summary_version"]
        if version != SUMMARY_VERSION:
            raise RecordError(f"{path}: has summary_version {version}, not {SUMMARY_VERSION}")
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise RecordError(f"{path}: is not a summary of a run: see {place}") from error

    def counts(self) -> Counter[Outcome]:
        """Return the number of rules by outcome."""
        return Counter(rule.outcome for rule in self.rules)

    def to_json(self) -> str:
        """Return JSON with one line for each field of the run, each rule and each failed check."""
        fields = self.model_dump(mode="json")
        return f"{_json(fields, depth=2)}\n"


def _counted(outcomes: Iterable[Outcome]) -> dict[Outcome, int]:
    counts = Counter(outcomes)
    return {outcome: counts[outcome] for outcome in Outcome if counts[outcome]}


def _json(value: Any, depth: int, indent: str = "") -> str:
    """Return JSON in which each item of the outermost `depth` levels has a line."""
    if not depth or not isinstance(value, (dict, list)) or not value:
        return json.dumps(value, ensure_ascii=False)
    inner = f"{indent}  "
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        items = [
            f"{json.dumps(key)}: {_json(one, depth - 1, inner)}" for key, one in fields.items()
        ]
        left, right = "{}"
    else:
        elements = cast("list[object]", value)
        items = [_json(one, depth - 1, inner) for one in elements]
        left, right = "[]"
    lines = ",\n".join(f"{inner}{item}" for item in items)
    return f"{left}\n{lines}\n{indent}{right}"


if __name__ == "__main__":
    sys.stdout.write(Summary.read(Path(sys.argv[1])).to_json())
