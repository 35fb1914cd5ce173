"""Wrong stores, each one change away from a right one, and the rule that must catch it.

    @caught_by("KV-202")
    class Shifted(DictStore):
        '''A missing middle page moves its successors up (seen in ...).'''

A check that no wrong store fails is worth nothing; `hicache-conformance selftest` shows that each rule
catches its own.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from hicache_conformance.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_conformance.run.subject import Subject
    from hicache_storage.storage import HiCacheStorage

_MODULES = (
    "basics",
    "contents",
    "removal",
    "refusals",
    "admission",
    "sizes",
    "verdicts",
    "batches",
    "buffers",
    "spaces",
    "names",
    "clearing",
    "half_clear",
    "listings",
    "sequences",
    "declarations",
    "lifecycle",
    "forked",
    "configs",
    "network",
    "deadlines",
    "recovery",
    "capacity",
    "crash",
    "dead_readers",
    "corruption",
    "concurrency",
)

S = TypeVar("S", bound="type[HiCacheStorage]")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A wrong store, and the rules that must catch it."""

    storage_class: type[HiCacheStorage]
    rule_ids: tuple[str, ...]
    subject: type[Subject] | None
    """Where it needs another config or other back doors than the store that it derives from."""
    check: str = ""
    """The check that is there for it, and is tried first; named where others take long to pass it."""

    @property
    def name(self) -> str:
        return self.storage_class.__name__

    @property
    def fault(self) -> str:
        """What is wrong with it, in a sentence."""
        return " ".join((self.storage_class.__doc__ or "").split("\n\n")[0].split())


_CONTROLS: dict[str, Mutant] = {}


def caught_by(
    *rule_ids: str, subject: type[Subject] | None = None, check: str = ""
) -> Callable[[S], S]:
    """Make a storage class a negative control. Each of the rules must catch it on its own."""

    def register(storage_class: S) -> S:
        control = Mutant(storage_class, rule_ids, subject, check)
        unknown = [rule_id for rule_id in rule_ids if rule_id not in RULES]
        if unknown:
            raise ValueError(f"control {control.name}: there is no rule {unknown[0]}")
        if not control.fault:
            raise ValueError(f"control {control.name}: its docstring says what is wrong with it")
        if control.name in _CONTROLS:
            raise ValueError(f"control {control.name}: another one has that name")
        _CONTROLS[control.name] = control
        return storage_class

    return register


@cache
def all_mutants() -> tuple[Mutant, ...]:
    """Every negative control, in the order of the modules."""
    for module in _MODULES:
        importlib.import_module(f"{__name__}.{module}")
    return tuple(_CONTROLS.values())
