"""The record of one run. Every other form of the report is made from it.

Its JSON has a version, `schema_version`. A reader accepts its own version and older ones. Fields
may be added, but never change their meaning.
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hicache_conformance.run.outcomes import Outcome, Verdict
from hicache_storage.errors import HiCacheError, shown

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA_VERSION = 2


class RecordError(HiCacheError, ValueError):
    """A file is not a record of a run, or it comes from a newer kit."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if the value is not an object.

    Raises:
        RecordError: The file cannot be read.
    """
    try:
        fields: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecordError(f"{shown(path)}: cannot be read as JSON: {reason}") from error
    return cast("dict[str, Any]", fields) if isinstance(fields, dict) else {}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CheckRecord(_Part):
    """One check: a test of one fact."""

    name: str
    title: str
    """The fact, as a sentence."""
    outcome: Outcome
    message: str = ""
    """The defect, or what was missing to test the fact; empty if the check passed."""
    expected: str = ""
    got: str = ""
    sequence: tuple[str, ...] = ()
    """The shortest sequence of calls that shows the defect."""
    evidence: dict[str, str] = Field(default_factory=dict[str, str])
    """Counts and measures of the check."""
    elapsed_s: float = 0.0
    stochastic: bool = False
    """True if a pass only means "not caught in this many tries"."""


class WaiverRecord(_Part):
    """A known violation that is accepted until a date."""

    reason: str
    link: str
    until: str


class RuleRecord(_Part):
    """One rule, with all of its checks."""

    id: str
    title: str
    statement: str
    family: str
    level: str
    since: str
    needs: tuple[str, ...] = ()
    consequence: str = ""
    """What happens to a user of a store that breaks the rule."""
    outcome: Outcome
    checks: tuple[CheckRecord, ...] = ()
    left_out: tuple[str, ...] = ()
    """The names of the rule's checks that did not run."""
    waiver: WaiverRecord | None = None


class CapabilityRecord(_Part):
    """One claim, and the outcome of the rules about it."""

    name: str
    claimed: str
    outcome: Literal["verified", "partly", "refuted", "not_verified"]
    note: str = ""
    """What was verified, if that is not the whole claim."""
    rules: tuple[str, ...] = ()


class SubjectRecord(_Part):
    """The store under test."""

    name: str
    target: str
    """`module:Class`."""
    version: str = ""
    """The version of the store's distribution, if known."""
    facts: dict[str, str] = Field(default_factory=dict[str, str])
    """What the store says about itself by topic, such as server and eviction policy."""
    config: dict[str, Any] = Field(default_factory=dict[str, Any])
    """The config without its secrets."""
    capabilities: tuple[CapabilityRecord, ...] = ()


class RunRecord(_Part):
    """The options of the run, and the machine that it ran on."""

    started_at: datetime
    elapsed_s: float
    seed: int
    quick: bool
    strict: bool
    selection: tuple[str, ...] = ()
    """The patterns of `--rules`; empty if there are none."""
    ran: int = 0
    """The number of checks that ran."""
    left_out: int = 0
    """How many checks of the rules' version did not run, for whatever reason."""
    spec: str
    """The version of the rules."""
    kit: str
    """The version of the distribution that holds the kit."""
    command: str = ""
    """The command that repeats the run."""
    python: str = ""
    platform: str = ""


class Record(_Part):
    """One run of the kit on one store."""

    schema_version: int = SCHEMA_VERSION
    subject: SubjectRecord
    run: RunRecord
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    """Why the verdict is not `conformant`, in a sentence each."""
    rules: tuple[RuleRecord, ...]

    @property
    def is_whole(self) -> bool:
        """True if every check of the rules' version ran."""
        run = self.run
        return not (run.left_out or run.selection or run.quick)  # older records lack the last two

    def counts(self) -> Counter[Outcome]:
        """Return how many rules have each outcome."""
        return Counter(rule.outcome for rule in self.rules)

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the record in a `result.json`.

        Raises:
            RecordError: The file can't be read, is not a record, or is from a newer kit.
        """
        fields = read_json(path)
        version = fields.get("schema_version")
        if not isinstance(version, int):
            raise RecordError(
                f"{path}: is not a record of a conformance run: it has no schema_version"
            )
        if version > SCHEMA_VERSION:
            raise RecordError(
                f"{path}: has schema_version {version}, but this kit reads only up"
                f" to {SCHEMA_VERSION}: update the kit"
            )
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            raise RecordError(
                f"{path}: is not a record of a conformance run: see {where}"
            ) from error
