from __future__ import annotations

import json

import pytest
from pages import space

from hicache_storage.backend_support.manifest import (
    PAGE_HASH,
    SPACE_ID,
    decode_manifest,
    encode_manifest,
    unreadable_space,
)
from hicache_storage.storage import UnreadableKind


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


def _with(**fields: object) -> str:
    return json.dumps(space().manifest() | fields)


@pytest.mark.parametrize(
    ("data", "kind", "reason"),
    [
        (None, UnreadableKind.DAMAGED, "its manifest is lost"),
        (b"", UnreadableKind.DAMAGED, "its manifest is damaged"),
        (b"[]", UnreadableKind.DAMAGED, "its manifest is damaged"),
        ('{"model": "m"}', UnreadableKind.DAMAGED, "its manifest is damaged"),
        (_with(shard=3), UnreadableKind.DAMAGED, "its manifest is damaged"),
        (_with(model=3), UnreadableKind.DAMAGED, "its manifest is damaged"),
        (_with(later=3), UnreadableKind.OTHER_VERSION, "another version wrote its manifest"),
        (_with(shard={"layers": [0, 9]}), UnreadableKind.OTHER_VERSION, "another version wrote"),
        (
            encode_manifest(space(model="other")),
            UnreadableKind.DAMAGED,
            f"its manifest is that of key space {space(model='other').id}",
        ),
    ],
)
def test_what_is_wrong_with_a_manifest_that_was_read(
    data: bytes | str | None, kind: UnreadableKind, reason: str
) -> None:
    found = unreadable_space(space().id, data)

    assert found is not None
    assert (space().id, kind) == (found.space_id, found.kind)
    assert found.reason.startswith(reason)


def test_nothing_is_wrong_with_the_manifest_of_the_key_space() -> None:
    assert unreadable_space(space().id, encode_manifest(space())) is None
