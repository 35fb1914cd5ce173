"""The rules for compositions, on `tiered` and `striped`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from composed_kit import Stripes, Tiers
from composed_stores import memory_member
from hicache_conformance.checks import Check, all_checks
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.run.subject import Scratch, Subject

from hicache_storage.registry import resolve

if TYPE_CHECKING:
    from hicache_storage.storage import HiCacheStorage

RULES = [check for check in all_checks() if check.rule.family == "Compositions"]
MEMBERS = [memory_member("a"), memory_member("b")]


class Through(Tiers, Subject):
    storage_class: ClassVar[type[HiCacheStorage]] = resolve("tiered")[0]

    def config(self, scratch: Scratch) -> dict[str, Any]:
        return self.compose(scratch, MEMBERS)


class Back(Through):
    write = "back"


class Striped(Stripes, Subject):
    storage_class: ClassVar[type[HiCacheStorage]] = resolve("striped")[0]

    def config(self, scratch: Scratch) -> dict[str, Any]:
        return self.compose(scratch, MEMBERS)


class Memory(Subject):
    storage_class: ClassVar[type[HiCacheStorage]] = resolve("memory")[0]

    def config(self, scratch: Scratch) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("check", RULES, ids=[check.name for check in RULES])
@pytest.mark.parametrize("subject", [Through, Back, Striped])
def test_a_composition_keeps_the_rule(subject: type[Subject], check: Check) -> None:
    record = run_check(subject, check, RunOptions())

    assert (Outcome.PASSED, "") == (record.outcome, f"{record.message} {record.got}".strip())


@pytest.mark.parametrize("check", RULES, ids=[check.name for check in RULES])
def test_a_store_that_is_no_composition_does_not_declare_the_rule(check: Check) -> None:
    record = run_check(partial(Memory), check, RunOptions())

    assert record.outcome is Outcome.NOT_DECLARED
