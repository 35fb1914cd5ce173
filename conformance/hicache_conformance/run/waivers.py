"""Waivers: known violations, each with a reason, a link and an end date.

    [[waiver]]
    rule = "KV-005"
    reason = "the server refuses overwrites until 2.4"
    link = "https://example.org/issues/12"
    until = 2027-03-31

A waived rule still runs. A waiver that is no longer needed is an error, because it would hide the
next violation.
"""

from __future__ import annotations

import datetime as dt
import tomllib
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hicache_conformance.report.record import CheckRecord, RuleRecord, WaiverRecord
from hicache_conformance.rules import RULES
from hicache_conformance.run.outcomes import Outcome
from hicache_storage.errors import ConfigError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Waiver(BaseModel):
    """One `[[waiver]]` of a waiver file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: str
    reason: str = Field(min_length=1)
    link: str = Field(pattern="^https?://")
    until: dt.date
    """The last day on which the waiver holds."""

    @field_validator("rule")
    @classmethod
    def _known(cls, rule: str) -> str:
        if rule not in RULES:
            raise ValueError(f"no rule has the number {rule}")
        return rule

    def has_ended(self) -> bool:
        """Return True if the last day of the waiver is over."""
        return dt.datetime.now(dt.UTC).date() > self.until

    def record(self) -> WaiverRecord:
        return WaiverRecord(reason=self.reason, link=self.link, until=self.until.isoformat())


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    waiver: list[Waiver] = Field(default_factory=list[Waiver])


def read_waivers(path: Path) -> dict[str, Waiver]:
    """Return the waivers of a file, by rule.

    Raises:
        ConfigError: The file cannot be read, or a waiver lacks a field. The message names the field.
    """
    try:
        waivers = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).waiver
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{shown(path)}: cannot be read as TOML: {reason}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {where}: {first['msg']}") from error
    found = {one.rule: one for one in waivers}
    if len(found) < len(waivers):
        raise ConfigError(f"{path}: a rule is waived twice: one waiver a rule")
    return found


def apply_waiver(record: RuleRecord, waivers: Mapping[str, Waiver]) -> RuleRecord:
    """Return the record of a rule, with the outcome that its waiver gives it if there is a waiver."""
    waiver = waivers.get(record.id)
    if waiver is None:
        return record
    outcome, complaint = _waived_outcome(record.outcome, waiver)
    checks = record.checks
    if complaint:
        checks = (*checks, _complaint(record, outcome, complaint))
    return record.model_copy(
        update={"outcome": outcome, "waiver": waiver.record(), "checks": checks}
    )


def _waived_outcome(outcome: Outcome, waiver: Waiver) -> tuple[Outcome, str]:
    if outcome is Outcome.FAILED:
        if waiver.has_ended():
            return (
                Outcome.FAILED,
                f"its waiver ended on {waiver.until}: fix the store, or renew the waiver",
            )
        return Outcome.WAIVED, ""
    if outcome in (Outcome.PASSED, Outcome.NOT_DECLARED):
        return Outcome.ERROR, f"a waiver for a rule that is {outcome.value} is stale: remove it"
    return outcome, ""


def _complaint(record: RuleRecord, outcome: Outcome, message: str) -> CheckRecord:
    return CheckRecord(
        name=f"{record.id}:waiver",
        title="The waiver of this rule holds and is needed.",
        outcome=outcome,
        message=message,
    )
