"""The names of objects.

PREFIX/spaces/ID.json     the key space, as JSON
PREFIX/ID/HH/HASH         one page; HH is the first two digits of its hash

The backend never touches an object with any other name. If a store partitions by name prefix, it can
partition below a key space, where the hashes spread evenly.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hicache_storage.backend_support.manifest import SPACE_ID

if TYPE_CHECKING:
    from collections.abc import Sequence

_PAGE = re.compile(r"(?P<fan>[0-9a-f]{2})/(?P=fan)(?:[0-9a-f]{2}){15,63}")


class Layout:
    """The names under one prefix, which is empty or ends with a slash. Immutable."""

    __slots__ = ("manifest_root", "prefix")

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.manifest_root = f"{prefix}spaces/"

    def root(self, space_id: str) -> str:
        """Return the prefix of the names of a key space's pages."""
        return f"{self.prefix}{space_id}/"

    def pages(self, space_id: str, hashes: Sequence[str]) -> list[str]:
        root = self.root(space_id)
        return [f"{root}{page_hash[:2]}/{page_hash}" for page_hash in hashes]

    def manifest(self, space_id: str) -> str:
        return f"{self.manifest_root}{space_id}.json"

    def is_page(self, space_id: str, name: str) -> bool:
        """Return True if `name` is the name of a page in this key space."""
        root = self.root(space_id)
        return name.startswith(root) and _PAGE.fullmatch(name, len(root)) is not None

    def space_id(self, name: str) -> str | None:
        """Return the key-space id if `name` is a manifest's name, else None."""
        space_id = name.removeprefix(self.manifest_root).removesuffix(".json")
        is_manifest = SPACE_ID.fullmatch(space_id) and name == self.manifest(space_id)
        return space_id if is_manifest else None
