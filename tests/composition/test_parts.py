"""The parts of a storage, by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from composed_stores import memory_member
from hicache_backends.memory import MemoryStorage
from hicache_backends.tiered import TieredStorage
from pages import blank, hash_of, page, space
from sealed_stores import sealed_over

from hicache_storage.backend_support.read_only import ReadOnlyStorage
from hicache_storage.composition.parts import all_parts, find_part, split_counter, undivided
from hicache_storage.errors import ConfigError, StorageClosed, UnsupportedOperation

SPACE = space(frame_nbytes=0)
HASHES = [hash_of(number) for number in range(8)]


def nested_config() -> dict[str, Any]:
    stripes = [memory_member("a"), memory_member("b")]
    nvme = {"name": "nvme", "backend": "striped", "config": {"stripes": stripes}}
    return {"tiers": [nvme, memory_member("bucket")]}


@pytest.fixture
def nested() -> Iterator[TieredStorage]:
    with TieredStorage.from_config(nested_config()) as storage:
        storage.open_space(SPACE)
        storage.batch_set(SPACE, HASHES, [page(seed=number) for number in range(8)])
        yield storage


def test_each_part_is_there_before_its_own_parts(nested: TieredStorage) -> None:
    assert ["nvme", "nvme/a", "nvme/b", "bucket"] == list(all_parts(nested))


def test_a_plain_store_has_no_parts() -> None:
    assert not all_parts(MemoryStorage())


def test_the_undivided_stores_hold_the_pages(nested: TieredStorage) -> None:
    counts = {name: len([*part.scan(SPACE)]) for name, part in undivided(nested).items()}

    assert ["nvme/a", "nvme/b", "bucket"] == list(counts)
    assert counts["nvme/a"] + counts["nvme/b"] == counts["bucket"] == 8


def test_a_plain_store_is_undivided_itself() -> None:
    storage = MemoryStorage()

    assert {"": storage} == undivided(storage)


def test_a_closed_composition_has_no_parts(nested: TieredStorage) -> None:
    nested.close()

    with pytest.raises(StorageClosed):
        nested.parts()


def test_a_wrong_name_is_answered_with_all_names(nested: TieredStorage) -> None:
    with pytest.raises(
        ConfigError, match=r"^--tier: .*'disk': choose one of nvme, nvme/a, nvme/b, bucket$"
    ):
        find_part(nested, "disk", "--tier")


def test_a_store_without_parts_says_so() -> None:
    with pytest.raises(ConfigError, match=r"^--tier 'nvme': this store has no tiers or stripes$"):
        find_part(MemoryStorage(), "nvme", "--tier")


def test_the_parts_of_a_read_only_storage_are_read_only(nested: TieredStorage) -> None:
    part = find_part(ReadOnlyStorage(nested), "nvme/a", "--tier")

    with pytest.raises(UnsupportedOperation, match="read-only"):
        part.clear(SPACE)


class TestEncrypted:
    """The parts of `encrypted` over a composition."""

    def test_a_part_opens_the_pages_that_the_whole_has_sealed(self, nested: TieredStorage) -> None:
        storage = sealed_over(nested)
        storage.open_space(SPACE)
        storage.batch_set(SPACE, HASHES[:1], [page(seed=0)])
        got = blank()

        assert storage.parts()["bucket"].batch_get(SPACE, HASHES[:1], [got]) == [True]
        assert page(seed=0).tobytes() == got.tobytes()

    def test_its_parts_have_the_header_of_the_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A tier that needs no alignment still gets pages in the form of the one that does."""
        with TieredStorage.from_config(nested_config()) as tiered:
            aligned = replace(tiered.capabilities, alignment=4096)
            monkeypatch.setitem(vars(tiered), "capabilities", aligned)
            storage = sealed_over(tiered)
            storage.open_space(SPACE)
            storage.batch_set(SPACE, HASHES[:1], [page(seed=0)])

            assert [SPACE] == [*storage.parts()["bucket"].spaces()]


@pytest.mark.parametrize(
    ("counter", "found"),
    [
        ("hits", ("", "hits")),
        ("nvme.hits", ("nvme", "hits")),
        ("nvme.a.hits", ("nvme/a", "hits")),
        ("nvme2.hits", ("", "nvme2.hits")),
    ],
)
def test_a_counter_is_about_the_deepest_part_that_its_name_begins_with(
    counter: str, found: tuple[str, str]
) -> None:
    assert found == split_counter(counter, ["nvme", "nvme/a"])
