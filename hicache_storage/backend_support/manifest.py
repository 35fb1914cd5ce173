"""Encode and decode the manifests of key spaces, and match the names that backends store."""

from __future__ import annotations

import json
import re

from hicache_storage.keys import KeySpace

SPACE_ID = re.compile(r"[0-9a-f]{32}")
"""Matches `KeySpace.id`."""
PAGE_HASH = re.compile(r"(?:[0-9a-f]{2}){16,64}")
"""Matches a page hash (contract KV-101)."""


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
