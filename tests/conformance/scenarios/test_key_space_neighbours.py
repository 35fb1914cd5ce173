"""Key spaces that a store may confuse differ in exactly what their descriptions name."""

from __future__ import annotations

import posixpath
from dataclasses import fields
from itertools import pairwise

import pytest
from hicache_conformance.scenarios.key_space_neighbours import (
    colliding_fields,
    equal_when_joined,
    known_similar_ids,
    neighbours,
    odd_names,
    odd_texts,
    rich_space,
    similar_ids,
)
from pages import space

from hicache_storage.keys import KeySpace, Shard

HOME = rich_space(space(frame_nbytes=64))
TEXTS = ("model", "dtype", "layout", "pool", "revision", "tenant")


def differing(one: KeySpace, other: KeySpace) -> set[str]:
    """Return the names of the fields in which two key spaces differ."""
    plain = {item.name for item in fields(KeySpace)} - {"shard"}
    shard = {item.name for item in fields(Shard)}
    return {name for name in plain if getattr(one, name) != getattr(other, name)} | {
        f"shard.{name}" for name in shard if getattr(one.shard, name) != getattr(other.shard, name)
    }


@pytest.mark.parametrize("quick", [True, False])
def test_a_neighbour_differs_in_the_field_that_it_names_and_in_no_other(*, quick: bool) -> None:
    for neighbour in neighbours(HOME, quick=quick):
        assert {neighbour.field} == differing(HOME, neighbour.space)


@pytest.mark.parametrize("quick", [True, False])
def test_there_is_a_neighbour_for_every_field(*, quick: bool) -> None:
    plain = {item.name for item in fields(KeySpace)} - {"shard"}
    shard = {f"shard.{item.name}" for item in fields(Shard)}

    assert plain | shard == {one.field for one in neighbours(HOME, quick=quick)}


def test_no_neighbour_has_larger_pages() -> None:
    assert HOME.stored_nbytes >= max(one.space.stored_nbytes for one in neighbours(HOME))


def test_colliding_fields_make_two_key_spaces() -> None:
    assert all(one != other for _, one, other in colliding_fields(HOME))


@pytest.mark.parametrize("separator", ["", "-", "/"])
def test_texts_that_are_equal_when_joined_are_one_text_in_any_order(separator: str) -> None:
    spaces = equal_when_joined(HOME, separator, "token")

    for names in (TEXTS, TEXTS[::-1], TEXTS[3:] + TEXTS[:3]):
        joined = {separator.join(getattr(one, name) for name in names) for one in spaces.values()}
        assert 1 == len(joined)
    assert len(TEXTS) == len(set(spaces.values()))


def test_similar_ids_have_ids_that_begin_or_end_alike() -> None:
    found = list(similar_ids(HOME, 4))

    assert 2 == len(found)
    for words, one, other in found:
        cut = slice(4) if "begin" in words else slice(-4, None)
        assert one.id[cut] == other.id[cut]
        assert one != other


def test_known_similar_ids_have_twelve_digits_in_common() -> None:
    (_, one, two), (_, three, four) = known_similar_ids()

    assert one.id[:12] == two.id[:12]
    assert one != two
    assert three.id[-12:] == four.id[-12:]
    assert three != four


@pytest.mark.parametrize("quick", [True, False])
def test_odd_names_are_all_different(*, quick: bool) -> None:
    names = odd_names("token", "/elsewhere", quick=quick)

    assert sorted(set(names)) == sorted(names)


def test_the_names_of_a_quick_run_are_among_all_of_them() -> None:
    few, names = (odd_names("token", "/elsewhere", quick=quick) for quick in (True, False))

    assert set(few) < set(names)


def test_names_lead_no_further_than_elsewhere_and_two_directories_up() -> None:
    for name in odd_names("token", "/elsewhere"):
        assert name.startswith("/elsewhere/") or not name.startswith("/")
        assert not posixpath.normpath(name).startswith("../../..")


def test_odd_texts_make_different_key_spaces() -> None:
    spaces = [one for _, one in odd_texts(HOME)]

    assert len(spaces) == len(set(spaces))
    assert all(one.model == other.model for one, other in pairwise(spaces))


@pytest.mark.parametrize("page_tokens", [1, 16, 300])
def test_similar_ids_are_other_spaces_than_the_one_that_they_are_made_of(page_tokens: int) -> None:
    """With a single equal digit, the search would soon find the key space itself."""
    own = space(page_tokens=page_tokens)

    for number in range(50):
        home = space(page_tokens=page_tokens, revision=str(number))
        for _, one, other in similar_ids(home, 1):
            assert home not in (one, other)
    assert own not in [one for _, *pair in similar_ids(own, 2) for one in pair]
