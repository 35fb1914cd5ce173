"""`--faults PLAN`: inject faults into the storage of a replay.

    get:raise@5%,set:flip@1%,exists:delay@10%,seed=7

An item is OPERATION:FAULT@SHARE or a setting. An operation is a method of the contract, without
`batch_`. A fault is a value of `hicache_storage.testing.Fault`. `@12` means only call number 12, counted
from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import ConfigError, did_you_mean, shown
from hicache_storage.replay.models import parse_number
from hicache_storage.testing import Fault, FaultyStorage, Odds, Strike

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_storage.storage import HiCacheStorage

_OPERATIONS = ("exists", "get", "set", "delete")
_MAX_FAULT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """A plan of faults in the calls of a storage. The same seed gives the same faults."""

    text: str
    """The text of the flag."""
    plan: tuple[Odds | Strike, ...]
    settings: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """Parse a fault plan.

        Raises:
            ConfigError: The message names the item that is wrong.
        """
        if shown(text) != text:
            raise ConfigError("--faults: must be OPERATION:FAULT@SHARE, as in get:raise@5%")
        plan: list[Odds | Strike] = []
        given: set[str] = set()
        settings: dict[str, Any] = {"hang_s": _HANG_S}
        for item in filter(None, (item.strip() for item in text.split(","))):
            if "=" in item:
                name, value = _setting(item)
                if name in given:
                    raise ConfigError(f"--faults: {item}: {name} is given twice")
                given.add(name)
                settings[name] = value
            else:
                plan.append(_fault(item))
        if not plan:
            raise ConfigError(f"--faults {text!r}: names no fault, as in get:raise@5%")
        return cls(text=text, plan=tuple(plan), settings=settings)

    def wrap(self, storage: HiCacheStorage) -> FaultyStorage:
        """Return `storage` with these faults. Close the returned storage to close both."""
        return FaultyStorage(storage, self.plan, **self.settings)


_HANG_S = 12.0
"""How long a hanging call takes. Longer than a page store's deadline, so the call returns late."""
_SETTINGS: dict[str, type[int | float]] = {"seed": int, "delay_s": float, "hang_s": float}


def fault_counts(storages: Iterable[FaultyStorage]) -> dict[str, int]:
    """Return how often each fault has happened, under the names used in a plan."""
    counts: dict[str, int] = {}
    for storage in storages:
        for (operation, fault), times in sorted(
            storage.struck.items(), key=lambda item: (item[0][0], item[0][1].value)
        ):
            name = f"{operation.removeprefix('batch_')}:{fault.value}"
            counts[name] = counts.get(name, 0) + times
    return counts


def _fault(item: str) -> Odds | Strike:
    operation, _, rest = item.partition(":")
    name, at, when = rest.partition("@")
    if not (rest and at):
        raise ConfigError(f"--faults: {item}: must be OPERATION:FAULT@SHARE, as in get:raise@5%")

    faults = {fault.value: fault for fault in Fault}
    if operation not in _OPERATIONS:
        hint = did_you_mean(operation, list(_OPERATIONS))
        raise ConfigError(f"--faults: {item}: unknown operation {operation!r}{hint}")
    if name not in faults:
        raise ConfigError(
            f"--faults: {item}: unknown fault {name!r}{did_you_mean(name, list(faults))}"
        )
    if when.endswith("%"):
        share = _number(item, when.removesuffix("%"), float)
        if not 0 < share <= 100:
            raise ConfigError(f"--faults: {item}: must be a share above 0 %, at most 100 %")
        return Odds(f"batch_{operation}", faults[name], share / 100)
    return Strike(f"batch_{operation}", int(_number(item, when, int)), faults[name])


def _setting(item: str) -> tuple[str, float]:
    name, _, value = item.partition("=")
    if name not in _SETTINGS:
        hint = did_you_mean(name, list(_SETTINGS))
        raise ConfigError(f"--faults: {item}: unknown setting {name!r}{hint}")
    number = _number(item, value, _SETTINGS[name])
    if name.endswith("_s") and number > _MAX_FAULT_S:
        raise ConfigError(f"--faults: {item}: must be at most {_MAX_FAULT_S:g} seconds")
    return name, number


def _number(item: str, text: str, kind: type[int | float]) -> float:
    """Parse a number that is at least 0. An int must consist only of digits."""
    number = parse_number(text)
    if number is None or (kind is int and not text.isdecimal()):
        expected = "a whole number" if kind is int else "a number"
        raise ConfigError(f"--faults: {item}: needs {expected}, 0 or more, not {text!r}")
    return kind(number)
