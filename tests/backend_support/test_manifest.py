from __future__ import annotations

import json

import pytest
from pages import space

from hicache_storage.backend_support.manifest import (
    PAGE_HASH,
    SPACE_ID,
    decode_manifest,
    encode_manifest,
)


def test_a_manifest_is_decoded_to_its_key_space() -> None:
    key_space = space(model="Llama \u00e9")

    assert key_space == decode_manifest(encode_manifest(key_space))


@pytest.mark.parametrize("data", [None, b"", b"{", b"[]", b"\xff", b"[" * 100_000, "{}"])
def test_data_that_are_no_manifest_are_none(data: bytes | str | None) -> None:
    assert decode_manifest(data) is None


def test_the_manifest_of_another_key_space_is_none() -> None:
    key_space = space()

    assert decode_manifest(encode_manifest(key_space), space_id="0" * 32) is None
    assert key_space == decode_manifest(encode_manifest(key_space), space_id=key_space.id)


def test_an_id_matches_the_pattern() -> None:
    assert SPACE_ID.fullmatch(space().id)
    assert not SPACE_ID.fullmatch(space().id.upper())


def test_a_manifest_is_plain_json() -> None:
    assert space().manifest() == json.loads(encode_manifest(space()))


def test_a_page_hash_matches_the_pattern() -> None:
    assert PAGE_HASH.fullmatch("0" * 64)
    assert not PAGE_HASH.fullmatch("0" * 31)
    assert not PAGE_HASH.fullmatch("0" * 33)
