"""Compare an engine's classes with the interface that an adapter was written for.

The functions return differences as clauses for one message. An empty text means no difference.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def require_no_difference(
    found: Sequence[str], engine: str, version: str, interface: str, tested: Sequence[str]
) -> None:
    """Raise ImportError if there are differences.

    Raises:
        ImportError: `found` is not empty. The message has every difference and the remedy.
    """
    if found:
        raise ImportError(
            f"the {interface} interface of {engine} {version} is not one that this adapter supports"
            f" ({', '.join(tested)}): {'; '.join(found)}. Update hicache-storage, or install"
            f" one of these versions of {engine}"
        )


def method_difference(base: Any, name: str, expected: tuple[str, ...]) -> str:
    """Return how the parameters of a method, after `self` or `cls`, differ from the expected ones."""
    method = getattr(base, name, None)
    if method is None:
        return f"{name} is missing"
    names = tuple(inspect.signature(method).parameters)
    actual = names if inspect.ismethod(method) else names[1:]  # a class method is bound
    if actual == expected:
        return ""
    return f"{name} takes ({', '.join(actual)}) instead of ({', '.join(expected)})"


def unknown_duties(base: Any, known: set[str]) -> list[str]:
    """Return a clause for each abstract method that the adapter does not know."""
    abstract: frozenset[str] = getattr(base, "__abstractmethods__", frozenset())
    return [f"{name} is abstract and unknown to this adapter" for name in sorted(abstract - known)]


def missing_names(owner: str, kind: str, expected: set[str], actual: set[str]) -> str:
    """Return a clause that lists the expected names that are missing, or "" if none are missing."""
    missing = sorted(expected - actual)
    return f"{owner} lacks the {kind} {', '.join(missing)}" if missing else ""


def field_names(record: Any) -> set[str]:
    """Return the field names of a dataclass or a named tuple, and none of anything else."""
    if record is None or not dataclasses.is_dataclass(record):
        return set(getattr(record, "_fields", ()))
    return {field.name for field in dataclasses.fields(record)}
