from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hicache_backends.encrypted.layout import (
    HEADER_NBYTES,
    Header,
    Names,
    authenticated,
    header_nbytes,
    is_sealed,
    write_header,
    write_tag,
)
from pages import hash_of, space

from hicache_storage.keys import KeySpace

NAMES = Names(b"k" * 32, HEADER_NBYTES)
SPACE = space(tenant="a bank")
NONCE, TAG = bytes(range(24)), bytes(range(16))


def header(key_id: str = "2026-q4", nbytes: int = HEADER_NBYTES) -> memoryview:
    memory = memoryview(bytearray(b"\xa5" * nbytes))
    write_header(memory, key_id, NONCE)
    write_tag(memory, TAG)
    return memory


@pytest.mark.parametrize("key_id", ["a", "x" * 47])
@pytest.mark.parametrize("nbytes", [HEADER_NBYTES, 4096])
def test_a_header_is_read_back(key_id: str, nbytes: int) -> None:
    found = Header.read(header(key_id, nbytes))

    assert found is not None
    assert (key_id, NONCE, TAG) == (found.key_id, found.nonce, found.tag)


@pytest.mark.parametrize("place", [0, 3, 4, 6])
def test_another_magic_or_version_is_no_header(place: int) -> None:
    memory = header()
    memory[place] ^= 1

    assert Header.read(memory) is None


def test_a_key_id_that_is_not_ascii_is_no_header() -> None:
    memory = header("a")
    memory[49] = 0xC3

    assert Header.read(memory) is None


@pytest.mark.parametrize(("place", "value"), [(48, 0), (48, 3), (48, 80), (49, ord("/")), (127, 1)])
def test_a_key_id_that_no_config_can_have_is_no_header(place: int, value: int) -> None:
    """Such an id was damaged, because no other config can list a key under it."""
    memory = header("ab")
    memory[place] = value

    assert Header.read(memory) is None


def test_the_tag_covers_every_other_byte_of_a_header() -> None:
    memory = header(nbytes=4096)
    covered = authenticated(memory, b"")

    assert len(covered) == 4096 - 16
    for place in (*range(32), *range(48, 4096, 31)):
        memory[place] ^= 1
        assert authenticated(memory, b"") != covered
        memory[place] ^= 1


def test_a_header_has_a_multiple_of_the_alignment() -> None:
    assert [128, 128, 512, 4096] == [header_nbytes(alignment) for alignment in (1, 32, 512, 4096)]


def test_the_name_of_a_key_space_is_always_the_same() -> None:
    again = Names(b"k" * 32, HEADER_NBYTES)

    assert again.sealed_space(SPACE).inner == NAMES.sealed_space(SPACE).inner


def test_another_key_gives_other_names() -> None:
    other = Names(b"K" * 32, HEADER_NBYTES).sealed_space(SPACE)

    assert other.inner.id != NAMES.sealed_space(SPACE).inner.id
    assert other.names([hash_of(1)]) != NAMES.sealed_space(SPACE).names([hash_of(1)])


@pytest.mark.parametrize("model", ["m", "Ünïcode/..", "x" * 300])
def test_a_key_space_is_opened_again(model: str) -> None:
    named = replace(SPACE, model=model)

    assert named == NAMES.opened_space(NAMES.sealed_space(named).inner)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "meta-llama/Llama-3.1-8B-Instruct"},
        {"model": "sealed:no base64"},
        {"model": "sealed:AAAA"},
        {"model": "sealed:" + "A" * 64},
        {"page_nbytes": 1},
        {"tenant": "another"},
    ],
)
def test_a_key_space_that_is_no_sealed_one_is_none(changes: dict[str, str | int]) -> None:
    inner = NAMES.sealed_space(SPACE).inner

    assert NAMES.opened_space(KeySpace.from_manifest({**inner.manifest(), **changes})) is None


def test_a_sealed_key_space_is_told_from_a_plain_one() -> None:
    plain = replace(SPACE, model="sealed:a name of somebody's")

    assert [True, False, False] == [
        is_sealed(each) for each in (NAMES.sealed_space(SPACE).inner, SPACE, plain)
    ]


def test_a_sealed_key_space_has_room_for_header_and_frame() -> None:
    framed = replace(SPACE, frame_nbytes=128)

    assert HEADER_NBYTES + 128 + 4096 == NAMES.sealed_space(framed).inner.stored_nbytes


@pytest.mark.parametrize("nbytes", [16, 17, 31, 32, 33, 63, 64])
def test_a_name_has_the_length_of_its_hash_and_gives_it_back(nbytes: int) -> None:
    page_hash = random.Random(nbytes).randbytes(nbytes).hex()
    sealed = NAMES.sealed_space(SPACE)
    (name,) = sealed.names([page_hash])

    assert len(name) == len(page_hash)
    assert name != page_hash
    assert page_hash == sealed.page_hash(name)


def test_a_name_that_is_too_short_is_none_of_a_page() -> None:
    assert NAMES.sealed_space(SPACE).page_hash("ab" * 15) is None


def test_a_page_has_other_names_in_other_key_spaces() -> None:
    here, there = NAMES.sealed_space(SPACE), NAMES.sealed_space(replace(SPACE, tenant="b"))

    assert here.names([hash_of(1)]) != there.names([hash_of(1)])
