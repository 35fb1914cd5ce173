"""Manifests: bytes parse to a key space or None, and a key space has one manifest and one id."""

from __future__ import annotations

import json
import re

from fuzz.choices import Choices
from pages import space

from hicache_storage.backend_support.manifest import decode_manifest, encode_manifest
from hicache_storage.keys import KeySpace

_SPACES = (
    space(),
    space(tenant="\u00e9", frame_nbytes=128),
    space(shard=space().shard, pool="mla"),
)
_ID = re.compile(r"[0-9a-f]{32}")
_FIELDS = (
    *("model", "dtype", "layout", "page_tokens", "page_nbytes", "shard", "pool", "revision"),
    *("tenant", "frame_nbytes", "layers", "heads", "context"),
)

SEEDS = (
    b"",
    *(b"\1" + encode_manifest(each) for each in _SPACES),
    b"\1" + encode_manifest(_SPACES[0]).decode().encode("utf-16"),
    b'\1{"shard": []}',
    b"\1" + b"[" * 2000,
    *(bytes([0, n]) + bytes(range(40)) for n in range(6)),
)
TOKENS = (
    *(f'"{name}"'.encode() for name in _FIELDS),
    *(b"null", b"true", b"1e999", b"NaN", b'"\\ud800"', b"9223372036854775808", b"-1", b"[0, 1]"),
)


def check(data: bytes) -> None:
    choices = Choices(data)
    if choices.flag():
        text = choices.rest()
    else:
        manifest = choices.pick(_SPACES).manifest()
        holder = manifest["shard"] if choices.flag() else manifest
        holder.update(choices.fields(_FIELDS))
        text = json.dumps(manifest).encode()
    found = decode_manifest(text)
    if found is None:
        return

    assert _ID.fullmatch(found.id)
    again = encode_manifest(found)
    assert found == decode_manifest(again, space_id=found.id)
    assert again == encode_manifest(KeySpace.from_manifest(found.manifest()))
    assert decode_manifest(text, space_id="0" * 32) is None
    for other in _SPACES:
        assert (other.id == found.id) == (other == found)
