"""Records of checks and rules for tests."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

from hicache_backends.memory import MemoryStorage
from hicache_conformance.report.record import CheckRecord, Record
from hicache_conformance.rules import RULES
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.verdict import RunFacts, make_record
from hicache_conformance.run.waivers import Waiver


def check_record(
    rule_id: str, outcome: Outcome, name: str = "a_fact", **fields: Any
) -> CheckRecord:
    """Return a check of `rule_id` with this `outcome`."""
    return CheckRecord(name=f"{rule_id}:{name}", title="A fact.", outcome=outcome, **fields)


def record(
    *checks: CheckRecord, waivers: Mapping[str, Waiver] | None = None, **facts: Any
) -> Record:
    """Return the record of a run of these checks, over the rules that they belong to.

    If a whole run would have more checks, `expected` has the names of all its checks.
    """
    rules = [RULES[rule_id] for rule_id in dict.fromkeys(one.name[:6] for one in checks)]
    given: dict[str, Any] = {
        "name": "acme",
        "storage_class": MemoryStorage,
        "claims": MemoryStorage.capabilities,
        "started_at": dt.datetime(2026, 11, 21, tzinfo=dt.UTC),
        "elapsed_s": 1.5,
        "expected": [one.name for one in checks],
    } | facts
    return make_record(RunFacts(**given), rules, checks, waivers or {})
