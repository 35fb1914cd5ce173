"""How long the calls of a composition may take, and whether it claims that they end in time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import pytest
from composed_stores import memory_member
from hicache_backends.memory import MemoryStorage

from hicache_storage.composition import storage as composition
from hicache_storage.registry import open_storage


class BoundedStorage(MemoryStorage):
    """A storage that claims that its calls end within `timeout_s`."""

    capabilities = replace(MemoryStorage.capabilities, bounded=True)
    timeout_s: float | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        found = super().from_config({})
        found.timeout_s = config.get("timeout_s")
        return found


@pytest.fixture(autouse=True)
def bounded_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every member of a composition be a `BoundedStorage`."""

    def resolve(_: str, config: Mapping[str, Any]) -> tuple[type[BoundedStorage], dict[str, Any]]:
        return BoundedStorage, dict(config)

    monkeypatch.setattr(composition, "resolve", resolve)


def limits(backend: str, **config: Any) -> tuple[list[float | None], bool]:
    """Return the time limit of each member, and whether the composition is bounded."""
    with open_storage(backend, config) as storage:
        found = [getattr(part, "inner", part) for part in storage.parts().values()]
        parts = [part for part in found if isinstance(part, BoundedStorage)]
        return [part.timeout_s for part in parts], storage.capabilities.bounded


def test_a_store_gets_the_time_of_the_composition() -> None:
    stripes = [memory_member(name) for name in "ab"]

    assert limits("striped", stripes=stripes, timeout_s=2) == ([2.0, 2.0], True)


def test_a_store_may_have_less_time_of_its_own() -> None:
    stripes = [memory_member("a", timeout_s=1), memory_member("b")]

    assert limits("striped", stripes=stripes, timeout_s="2s") == ([1, 2.0], True)


def test_stripes_with_more_time_than_the_whole_are_not_bounded() -> None:
    stripes = [memory_member("a", timeout_s="3s"), memory_member("b")]

    assert limits("striped", stripes=stripes, timeout_s=2) == (["3s", 2.0], False)


def test_tiers_are_not_bounded_because_a_get_waits_for_each() -> None:
    tiers = [memory_member(name) for name in "ab"]

    assert limits("tiered", tiers=tiers, timeout_s=2) == ([2.0, 2.0], False)
