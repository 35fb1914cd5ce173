"""What an open store says about itself, for the report."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from hicache_conformance.case.case import Case

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.run.subject import Subject
    from hicache_storage.storage import Capabilities, HiCacheStorage

_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class StoreDescription:
    """What an open store says about itself."""

    claims: Capabilities
    facts: dict[str, str]
    """Facts by topic, such as the version of its server: `HiCacheStorage.diagnose`."""
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    """The config that it was opened with. Names stand for the directory and the token of the test."""


def describe_subject(subject: Subject) -> StoreDescription:
    """Open a store as a test would, and return what it says about itself. Pass on its exceptions."""
    with Case(subject) as case:
        storage = case.open_storage()
        config = _named(case.config, str(case.scratch.path), case.scratch.prefix)
        return StoreDescription(storage.capabilities, facts_of(storage), config)


def described_in_time(subject: Subject) -> StoreDescription | None:
    """Return the description of a store, or None if it fails or takes too long."""
    found: list[StoreDescription] = []

    def run() -> None:
        with suppress(Exception):  # the checks judge this
            found.append(describe_subject(subject))

    thread = threading.Thread(target=run, name="description", daemon=True)
    thread.start()
    thread.join(_LIMIT_S)
    return found[0] if found else None


def facts_of(storage: HiCacheStorage) -> dict[str, str]:
    """Return the facts of a storage by topic. The facts of several servers are joined by `; `."""
    facts: dict[str, list[str]] = {}
    with suppress(Exception):  # a fact that the store can't give is left out
        for one in storage.diagnose():
            facts.setdefault(one.topic, []).append(one.fact)
    return {topic: "; ".join(dict.fromkeys(told)) for topic, told in facts.items()}


def _named(value: Any, path: str, prefix: str) -> Any:
    """Return a config with `{scratch}` and `{prefix}` in place of the names of one test."""
    if isinstance(value, str):
        return value.replace(path, "{scratch}").replace(prefix, "{prefix}")
    if isinstance(value, dict):
        fields = cast("dict[object, object]", value)
        return {name: _named(one, path, prefix) for name, one in fields.items()}
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[object]", value)
        return [_named(one, path, prefix) for one in items]
    return value
