"""Encode and decode the manifests of key spaces, and match the names that backends store."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

from hicache_storage.keys import KeySpace, Shard
from hicache_storage.storage import UnreadableKind, UnreadableSpace

SPACE_ID = re.compile(r"[0-9a-f]{32}")
"""Matches `KeySpace.id`."""
PAGE_HASH = re.compile(r"(?:[0-9a-f]{2}){16,64}")
"""Matches a page hash (contract KV-101)."""
_FIELDS = {field.name for owner in (KeySpace, Shard) for field in fields(owner)}


def encode_manifest(space: KeySpace) -> bytes:
    """Return the manifest of `space` as JSON. Equal key spaces have equal manifests."""
    return json.dumps(space.manifest(), sort_keys=True).encode()


def decode_manifest(data: bytes | str | None, *, space_id: str | None = None) -> KeySpace | None:
    """Return the key space that a manifest describes.

    Return None if the data is missing or damaged, or describes a key space whose id is not
    `space_id`.
    """
    try:
        space = KeySpace.from_manifest(json.loads(data or b""))
    except (ValueError, RecursionError):
        return None
    return space if space_id is None or space.id == space_id else None


def unreadable_space(space_id: str, data: bytes | str | None) -> UnreadableSpace | None:
    """Return what is wrong with a manifest that was read, or None if it is that of `space_id`.

    `data` is None if the store answered that it has no manifest.
    """
    space, kind = decode_manifest(data), UnreadableKind.DAMAGED
    if space is not None and space.id == space_id:
        return None
    if data is None:
        reason = "its manifest is lost"
    elif _has_other_fields(data):
        kind, reason = UnreadableKind.OTHER_VERSION, "another version wrote its manifest"
    elif space is not None:
        reason = f"its manifest is that of key space {space.id}"
    else:
        reason = "its manifest is damaged"
    return UnreadableSpace(space_id, kind, reason)


def _has_other_fields(data: bytes | str) -> bool:
    """Return True for a manifest with fields that this version does not know, or without some."""
    try:
        manifest: Any = json.loads(data)
        names = {*manifest, *manifest["shard"]}
    except (ValueError, RecursionError, TypeError, KeyError):
        return False
    return "model" in names and names != _FIELDS
