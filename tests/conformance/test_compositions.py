"""The rules for compositions, on `tiered` and `striped`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from composed_kit import Stripes, Tiers
from composed_stores import memory_member
from hicache_conformance.checks import Check, all_checks
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.run.subject import Scratch, Subject
from hicache_conformance.tools.composition.members import Member

from hicache_storage.registry import resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage

RULES = [check for check in all_checks() if check.rule.family == "Compositions"]
LONG = [check for check in RULES if not check.quick]
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


def outcome(subject: type[Subject], check: Check, *, quick: bool) -> tuple[Outcome, str]:
    record = run_check(subject, check, RunOptions(quick=quick))
    return record.outcome, f"{record.message} {record.got}".strip()


NO_COPIES = (Outcome.NOT_DECLARED, "the composition has each page in one member only")
EACH_CHECK = pytest.mark.parametrize("check", RULES, ids=[check.name for check in RULES])


@EACH_CHECK
@pytest.mark.parametrize("subject", [Back, Striped])
def test_a_composition_keeps_the_rule(subject: type[Subject], check: Check) -> None:
    """The self-test has tiers that are written through among its right stores."""
    if not check.quick:
        pytest.skip("the slow test has it")
    assert outcome(subject, check, quick=True) in {(Outcome.PASSED, ""), NO_COPIES}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", LONG, ids=[check.name for check in LONG])
@pytest.mark.parametrize("subject", [Through, Striped])
def test_a_composition_keeps_the_rule_in_a_long_check(subject: type[Subject], check: Check) -> None:
    assert outcome(subject, check, quick=False) in {(Outcome.PASSED, ""), NO_COPIES}


def test_a_thread_that_gets_no_processor_for_a_while_costs_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each lookup in the first member is late by more than the limit of the composition."""
    exists = Member.exists

    def late(self: Member, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        if self.name == "a" and len(hashes) > 1:
            time.sleep(0.4)
        return exists(self, space, hashes)

    monkeypatch.setattr(Member, "exists", late)
    (check,) = [one for one in RULES if one.name.endswith("wiped_member_can_be_set_again")]

    assert (Outcome.PASSED, "") == outcome(Striped, check, quick=True)


@pytest.mark.parametrize("subject", [Through, Back])
@pytest.mark.parametrize("name", ["reaches_copies_under_way", "gets_no_copy_that_was_under_way"])
def test_removals_meet_copies_of_tiers(subject: type[Subject], name: str) -> None:
    (check,) = [one for one in RULES if one.name.endswith(name)]

    evidence = run_check(subject, check, RunOptions()).evidence

    assert int(evidence["copies that were held"]) > 0


@EACH_CHECK
def test_a_store_that_is_no_composition_does_not_declare_the_rule(check: Check) -> None:
    assert outcome(Memory, check, quick=True)[0] is Outcome.NOT_DECLARED
