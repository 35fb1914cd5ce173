"""Wrong stores ("mutants"): each changes a right one in one place, and names checks that must catch it.

    @caught_by("KV-202:a_missing_page_changes_no_other", says="of a batch of 2 are missing")
    class MovesUpAfterAMiss(DictStore):
        '''After a missing page, each page is read into the memory of the page before it.'''

A check that no wrong store fails proves nothing. Every check names at least one mutant here, and
`hicache-conformance selftest` runs exactly these pairs. docs/kill-matrix.md has all pairs of one rule.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_conformance.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_conformance.run.subject import Subject
    from hicache_storage.storage import HiCacheStorage

_MODULES = (
    "basics",
    "removal",
    "batches",
    "key_spaces",
    "declarations",
    "lifecycle",
    "network",
    "persistence",
    "concurrency",
    "compositions",
)

S = TypeVar("S", bound="type[HiCacheStorage]")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A wrong store, with the checks that must catch it."""

    storage_class: type[HiCacheStorage]
    checks: tuple[str, ...]
    """The full names of the checks, such as `KV-202:a_missing_page_changes_no_other`."""
    says: str = ""
    """A pattern that the violation must match. If it is set, the violation needs a call sequence."""
    subject: type[Subject] | None = None
    """The config and the back doors, if they differ from those of the mutant's base class."""
    seen_in: str = ""
    """The real systems that have or had this defect; empty if none is known."""

    @property
    def name(self) -> str:
        return self.storage_class.__name__

    @property
    def rule_ids(self) -> tuple[str, ...]:
        """The rules that this mutant's checks belong to, each named once."""
        return tuple(dict.fromkeys(check.partition(":")[0] for check in self.checks))

    @property
    def fault(self) -> str:
        """The defect, in one sentence."""
        return " ".join((self.storage_class.__doc__ or "").split("\n\n")[0].split())


_MUTANTS: dict[str, Mutant] = {}


def caught_by(
    *checks: str, says: str = "", subject: type[Subject] | None = None, seen_in: str = ""
) -> Callable[[S], S]:
    """Register a storage class as a mutant. Each of the checks must fail it on its own."""

    def register(storage_class: S) -> S:
        mutant = Mutant(storage_class, checks, says, subject, seen_in)
        unknown = [rule_id for rule_id in mutant.rule_ids if rule_id not in RULES]
        if unknown:
            raise ValueError(f"mutant {mutant.name}: there is no rule {unknown[0]}")
        if not mutant.fault:
            raise ValueError(f"mutant {mutant.name}: it needs a docstring that states its fault")
        if mutant.name in _MUTANTS:
            raise ValueError(f"mutant {mutant.name}: another mutant has that name")
        _MUTANTS[mutant.name] = mutant
        return storage_class

    return register


def own(make: Callable[[], Any]) -> Any:
    """Return an attribute that each store has for itself. `make` creates it when it is first used."""
    return _Own(make)


class _Own:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, store: object, owner: type) -> Any:
        return vars(store).setdefault(self._name, self._make())


@cache
def all_mutants() -> tuple[Mutant, ...]:
    """Return every mutant, in the order of the modules."""
    for module in _MODULES:
        importlib.import_module(f"{__name__}.{module}")
    places = {f"{__name__}.{module}": place for place, module in enumerate(_MODULES)}
    # another import may have come first
    return tuple(sorted(_MUTANTS.values(), key=lambda one: places[one.storage_class.__module__]))


def mutant_named(name: str) -> Mutant:
    """Return the mutant whose class has this name."""
    return next(mutant for mutant in all_mutants() if mutant.name == name)
