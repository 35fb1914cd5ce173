"""Records of runs as they look in practice, for the tests of the report's forms."""

from __future__ import annotations

import datetime as dt
from typing import Any

from hicache_conformance.report.record import (
    CapabilityRecord,
    CheckRecord,
    Record,
    RuleRecord,
    RunRecord,
    SubjectRecord,
    WaiverRecord,
)
from hicache_conformance.rules import RULES
from hicache_conformance.run.outcomes import Outcome, Verdict

COMMAND = (
    "hicache-conformance --hicache-storage-backend acme --hicache-storage-backend-extra-config"
    """ '{"url": "acme://kv:***@cache.internal:7070"}' --seed 7 --report out"""
)


def check_of(rule_id: str, outcome: Outcome = Outcome.PASSED, **fields: Any) -> CheckRecord:
    """Return a check of a rule. Its name is `a_fact` unless `fields` has another."""
    given: dict[str, Any] = {
        "name": f"{rule_id}:a_fact",
        "title": "A fact about the store holds.",
        "elapsed_s": 0.214,
    }
    return CheckRecord.model_validate({**given, "outcome": outcome, **fields})


def rule_of(
    rule_id: str, outcome: Outcome = Outcome.PASSED, *checks: CheckRecord, **fields: Any
) -> RuleRecord:
    """Return a rule with this outcome. If no check is given, it has a check with the same outcome."""
    rule = RULES[rule_id]
    given = {
        "id": rule.id,
        "title": rule.title,
        "statement": rule.statement,
        "family": rule.family,
        "level": rule.level.value,
        "since": rule.since,
        "needs": tuple(need.value for need in rule.needs),
        "consequence": rule.consequence,
    }
    return RuleRecord.model_validate(
        {**given, "outcome": outcome, "checks": checks or (check_of(rule_id, outcome),), **fields}
    )


def record_of(
    *rules: RuleRecord,
    verdict: Verdict = Verdict.CONFORMANT,
    reasons: tuple[str, ...] = (),
    **run: Any,
) -> Record:
    """Return a run over `rules`. `run` describes how it was made."""
    given: dict[str, Any] = {
        "started_at": dt.datetime(2026, 11, 21, 9, 14, tzinfo=dt.UTC),
        "elapsed_s": 83.4,
        "seed": 7,
        "quick": False,
        "strict": False,
        "spec": "1.0",
        "kit": "0.1.0",
        "command": COMMAND,
        "python": "3.11.9",
        "platform": "linux x86_64",
    }
    subject = SubjectRecord(
        name="acme",
        target="hicache_acme.storage:AcmeStorage",
        version="hicache-acme 2.4.1",
        facts={"server": "Acme 7.2.4, master"},
        config={"url": "acme://kv:***@cache.internal:7070", "timeout_s": 2.0},
        capabilities=(
            CapabilityRecord(
                name="durability", claimed="crash", outcome="refuted", rules=("KV-401", "KV-402")
            ),
            CapabilityRecord(
                name="shared", claimed="yes", outcome="verified", rules=("KV-502",)
            ),
            CapabilityRecord(name="alignment", claimed="1", outcome="not_verified"),
        ),
    )  # fmt: skip
    return Record(
        subject=subject,
        run=RunRecord(**{**given, **run}),
        verdict=verdict,
        reasons=reasons,
        rules=rules,
    )


TORN = check_of(
    "KV-003",
    Outcome.FAILED,
    name="KV-003:a_hit_is_whole",
    title="What is read back is what was set, byte for byte.",
    message="a hit holds other bytes than were set",
    expected="the 4096 bytes that were set, or a miss",
    got="4096 bytes: the right ones up to 2048, then <zeros> & \x1b[31mmore",
    sequence=(
        "store.open_space(3f2a9c01) -> None",
        "store.batch_set(5feceb66, 6b86b273) -> [True, True]",
        "store.batch_get(5feceb66, 6b86b273) -> [True, True]",
    ),
)
WAIVER = WaiverRecord(
    reason="the server refuses overwrites until 2.5",
    link="https://example.org/issues/12",
    until="2027-03-31",
)
DOORLESS = check_of("KV-403", Outcome.NOT_VERIFIED, message="needs the back door `tamper`")


def conformant() -> Record:
    """Return a run with three rules that hold, and one that could not be verified."""
    figures = check_of("KV-302", evidence={"growth of memory in 50 rounds": "212 KiB"})
    return record_of(
        rule_of("KV-001"),
        rule_of("KV-002"),
        rule_of("KV-302", Outcome.PASSED, figures),
        rule_of("KV-403", Outcome.NOT_VERIFIED, DOORLESS),
        rule_of("KV-504", Outcome.NOT_DECLARED),
    )


def failed() -> Record:
    """Return a run with a rule that fails one of two checks, and one that the kit could not test."""
    return record_of(
        rule_of("KV-001"),
        rule_of("KV-003", Outcome.FAILED, check_of("KV-003"), TORN),
        rule_of("KV-301", Outcome.ERROR),
        verdict=Verdict.FAILED,
        reasons=("KV-003 A hit is exactly the bytes that were set: failed",),
    )


def partial() -> Record:
    """Return a run with one rule waived."""
    violation = check_of("KV-005", Outcome.FAILED, message="the second set returned False")
    return record_of(
        rule_of("KV-001"),
        rule_of("KV-005", Outcome.WAIVED, violation, waiver=WAIVER),
        verdict=Verdict.PARTIAL,
        reasons=("KV-005 Setting a present page succeeds and leaves it whole: waived",),
    )
