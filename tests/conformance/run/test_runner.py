"""Checks that are tried again."""

from __future__ import annotations

import pytest
from hicache_conformance.case.case import Case
from hicache_conformance.checks import Check
from hicache_conformance.rules import RULES
from hicache_conformance.run.outcomes import Outcome, Violation
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.selftest.references.subjects import DictSubject
from hicache_conformance.tools.processes.machine import MachineDelay


@pytest.mark.parametrize(
    ("limit_s", "waited_s", "outcome"),
    [(0.5, 1.0, Outcome.PASSED), (0.5, 0.1, Outcome.FAILED), (None, 1.0, Outcome.FAILED)],
)
def test_only_a_store_that_the_machine_held_up_for_its_time_limit_gets_another_try(
    monkeypatch: pytest.MonkeyPatch, limit_s: float | None, waited_s: float, outcome: Outcome
) -> None:
    def waited(_: MachineDelay) -> float:
        return waited_s

    monkeypatch.setattr(MachineDelay, "so_far_s", waited)
    tries: list[Case] = []

    def is_late_once(case: Case) -> None:
        tries.append(case)
        if limit_s is not None:
            case.hurries(limit_s)
        if len(tries) == 1:
            raise Violation("a call was late", "", "", ())

    check = Check(RULES["KV-001"], is_late_once, (), quick=True, stochastic=False)

    assert outcome is run_check(DictSubject, check, RunOptions()).outcome
