"""The registry of checks. A check is a function that takes a `Case` and tests one fact of a rule."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from hicache_conformance.rules import RULES, Need, Rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_conformance.case.case import Case

_MODULES = (
    "basics.round_trips",
    "basics.contents",
    "basics.removal",
    "basics.refusals",
    "basics.unwritable",
    "basics.admission",
    "basics.sizes",
    "basics.times",
    "key_spaces.spaces",
    "key_spaces.names",
    "key_spaces.ranks",
    "key_spaces.clearing",
    "key_spaces.partial_clear",
    "key_spaces.listings",
    "key_spaces.space_listings",
    "batches.verdicts",
    "batches.duplicates",
    "batches.batch_sizes",
    "batches.buffers",
    "batches.digests",
    "lifecycle.closing",
    "lifecycle.process_hygiene",
    "lifecycle.fork",
    "lifecycle.configs",
    "lifecycle.secrets",
    "lifecycle.network",
    "lifecycle.deadlines",
    "lifecycle.recovery",
    "lifecycle.unanswered_calls",
    "batches.round_trip_counts",
    "lifecycle.capacity",
    "lifecycle.eviction",
    "lifecycle.exhaustion",
    "lifecycle.looking",
    "persistence.crash",
    "persistence.interrupted_writes",
    "persistence.dead_readers",
    "persistence.corruption",
    "persistence.power_cut",
    "concurrency.interleavings",
    "concurrency.races",
    "concurrency.linearizability",
    "concurrency.parallel_calls",
    "concurrency.processes",
    "compositions.failing_members",
    "compositions.hanging_members",
    "compositions.refused_pages",
    "compositions.lost_pages",
    "compositions.damaged_members",
    "compositions.removal",
    "compositions.listings",
    "declarations.declarations",
    "declarations.bounded",
    "declarations.revocable",
    "declarations.limits",
)


@dataclass(frozen=True, slots=True)
class Check:
    """One test of one rule."""

    rule: Rule
    run: Callable[[Case], None]
    needs: tuple[Need, ...]
    """What this check needs in addition to the needs of its rule."""
    quick: bool
    """True if `--quick` runs this check."""
    stochastic: bool
    """True if a pass only means "not caught in this many tries"."""

    @property
    def name(self) -> str:
        """The rule and the function, such as `KV-002:what_was_set_is_read_back`."""
        return f"{self.rule.id}:{self.run.__name__}"

    @property
    def title(self) -> str:
        """The fact that the check tests: the first paragraph of its docstring."""
        return " ".join((self.run.__doc__ or self.run.__name__).split("\n\n")[0].split())


_CHECKS: dict[str, Check] = {}


def check(
    rule_id: str, *needs: Need, quick: bool = True, stochastic: bool = False
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Register a function as a check of rule `rule_id`. Its docstring states the fact in a sentence."""

    def register(run: Callable[[Case], None]) -> Callable[[Case], None]:
        new = Check(RULES[rule_id], run, needs, quick, stochastic)
        if new.name in _CHECKS:
            raise ValueError(f"two checks are called {new.name}")
        _CHECKS[new.name] = new
        return run

    return register


@cache
def all_checks() -> tuple[Check, ...]:
    """Return all checks, in the order of the rules."""
    for module in _MODULES:
        importlib.import_module(f"{__name__}.{module}")
    order = list(RULES)
    return tuple(sorted(_CHECKS.values(), key=lambda one: order.index(one.rule.id)))
