"""Wrong configs of compositions: the message names the tier or stripe, and shows no secret."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from composed_stores import file_member, memory_member
from hicache_backends.memory import MemoryStorage

from hicache_storage.errors import (
    BackendNotInstalled,
    ConfigError,
    HiCacheError,
    StorageUnavailable,
    UnknownBackend,
)
from hicache_storage.registry import open_storage

SECRET = "hunter2-do-not-tell"  # noqa: S105 - no real secret
A, B = memory_member("a"), memory_member("b")


def refusal(backend: str, **config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        open_storage(backend, config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ({"name": "b", "backend": "s3"}, "tiers.b: s3: bucket: this field is required"),
        ({"name": "b", "backend": "memory", "path": "/x"}, "unknown field 'tiers.b.path'; choose"),
        ({"name": "b"}, "tiers.b.backend: this field is required"),
        ({"backend": "memory"}, "tiers.1.name: this field is required"),
        ({"name": "b/c", "backend": "memory"}, "tiers.1.name: must be 1 to 32 letters, digits,"),
        ("memory", "tiers.1: must be an object with name, backend, config"),
        (A, "tiers: two stores have the name 'a': give each one of its own"),
    ],
)
def test_a_wrong_tier_is_named(member: object, message: str) -> None:
    assert refusal("tiered", tiers=[A, member]).startswith(f"tiered: {message}")


@pytest.mark.parametrize("tiers", [[], [A]])
def test_one_store_needs_no_composition(tiers: list[Any]) -> None:
    assert refusal("tiered", tiers=tiers) == (
        "tiered: tiers: give at least two stores, because one needs no composition"
    )


def test_an_error_in_a_tier_of_stripes_has_both_names() -> None:
    wrong = {"name": "y", "backend": "file", "config": {"pth": "/x"}}
    nvme = {"name": "nvme", "backend": "striped", "config": {"stripes": [A, wrong]}}

    assert refusal("tiered", tiers=[nvme, B]) == (
        "tiered: tiers.nvme: striped: stripes.y: file: path: this field is required;"
        " unknown field 'pth'; did you mean 'path'?"
    )


def test_an_unknown_backend_is_that_of_a_tier() -> None:
    with pytest.raises(
        UnknownBackend, match=r"^tiered: tiers.b: unknown .* 'memroy'; did you mean 'memory'\?"
    ):
        open_storage("tiered", {"tiers": [A, {"name": "b", "backend": "memroy"}]})


def test_an_unknown_backend_deep_below_has_the_whole_place() -> None:
    nvme = {"name": "nvme", "backend": "striped", "config": {"stripes": [A, {**B, "backend": "x"}]}}

    with pytest.raises(UnknownBackend, match=r"^tiered: tiers.nvme: striped: stripes.b: unknown"):
        open_storage("tiered", {"tiers": [nvme, B]})


def test_a_missing_library_is_that_of_a_tier() -> None:
    config = {"backend_name": "acme", "module_path": "not_installed", "class_name": "Acme"}

    with pytest.raises(BackendNotInstalled, match=r"^tiered: tiers.b: dynamic: module_path"):
        open_storage(
            "tiered", {"tiers": [A, {"name": "b", "backend": "dynamic", "config": config}]}
        )


def test_a_store_that_cannot_be_reached_is_that_of_a_tier() -> None:
    redis = {"name": "rack", "backend": "redis", "config": {"url": "redis://127.0.0.1:1/0"}}

    with pytest.raises(StorageUnavailable, match=r"^tiered: tiers.rack: redis: cannot connect"):
        open_storage("tiered", {"tiers": [A, {**redis, "required": True}]})


@pytest.mark.parametrize("capacity", ["1 zillion", -1, 0])
def test_a_wrong_capacity_is_that_of_a_stripe(capacity: object) -> None:
    stripes = [memory_member("a", capacity_nbytes=capacity), memory_member("b", capacity_nbytes=9)]

    assert refusal("striped", stripes=stripes).startswith(
        "striped: stripes.a.config.capacity_nbytes: must be "
    )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1}, "weights: stripe 'b' has none: give each one"),
        ({"a": 1, "b": 1, "bb": 1}, "weights: there is no stripe 'bb'; did you mean 'b'?"),
        ({"a": 1, "b": 0}, "weights: each must be above 0"),
        ({"a": 1, "b": float("inf")}, "weights.b: must be a finite number, not inf"),
        ({"a": 1, "b": True}, "weights.b: must be a number, such as 2.5, not True"),
    ],
)
def test_wrong_weights_are_told(weights: dict[str, Any], message: str) -> None:
    assert refusal("striped", stripes=[A, B], weights=weights) == f"striped: {message}"


def test_one_store_is_not_two_stripes(tmp_path: Path) -> None:
    stripes = [
        file_member("a", tmp_path / "x"),
        file_member("b", tmp_path / "y" / ".." / "x", capacity_nbytes="1GiB"),
    ]

    assert refusal("striped", stripes=stripes) == (
        "striped: stripes.b: this is the same store as 'a': name another one"
    )


def test_two_stores_in_memory_are_two() -> None:
    open_storage("striped", {"stripes": [A, B]}).close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "b", "backend": f"redis://:{SECRET}@host"},
        {"name": f"redis://:{SECRET}@host", "backend": "memory"},
        {"name": "b", "backend": "redis", "config": {"url": f"redis://:{SECRET}@host/0x"}},
        {"name": "b", "backend": "redis", "config": f"redis://:{SECRET}@host"},
        {"name": "b", "backend": "memory", "config": {"capacity_nbytes": SECRET}},
        {
            "name": "b",
            "backend": "redis",
            "config": {"url": f"redis://:{SECRET}@127.0.0.1:1/0"},
            "required": True,
        },
        f"redis://:{SECRET}@host",
    ],
)
def test_no_message_shows_a_secret(wrong: object) -> None:
    capacious = memory_member("a", capacity_nbytes="1GiB")
    for backend, field in (("tiered", "tiers"), ("striped", "stripes")):
        with pytest.raises(HiCacheError) as caught:
            open_storage(backend, {field: [capacious, wrong]})

        assert SECRET not in str(caught.value)


class OwnLimit(MemoryStorage):
    """A store that ends its calls in time, and whose config has no time limit."""

    capabilities = replace(MemoryStorage.capabilities, bounded=True)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        if config:
            raise ConfigError(f"own: unknown field {next(iter(config))!r}")
        return cls()


def test_a_bounded_store_without_the_field_timeout_s_keeps_its_own_limit() -> None:
    own = {"backend_name": "own", "module_path": __name__, "class_name": "OwnLimit"}
    members = [{"name": name, "backend": "dynamic", "config": own} for name in "ab"]

    with open_storage("striped", {"stripes": members}) as storage:
        assert ["a", "b"] == list(storage.parts())


def test_a_refused_composition_makes_no_store(tmp_path: Path) -> None:
    members = [file_member(name, tmp_path / "kv") for name in "ab"]

    assert "this is the same store as 'a'" in refusal("tiered", tiers=members)
    assert not (tmp_path / "kv").exists()
