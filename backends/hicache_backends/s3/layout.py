"""The names of objects.

PREFIX/spaces/ID.json     the key space, as JSON
PREFIX/ID/HH/HASH         one page; HH: the first two digits of its hash

What has another name is somebody else's, and is never touched. A store that splits by the beginning of
names splits below a key space, where the hashes spread evenly.
"""

from __future__ import annotations

import re

_PAGE = re.compile(r"(?P<fan>[0-9a-f]{2})/(?P=fan)(?:[0-9a-f]{2}){15,63}")
_MANIFEST = re.compile(r"[0-9a-f]{32}\.json")


class Names:
    """The names under one prefix, which is empty or ends with a slash. Immutable."""

    __slots__ = ("manifests", "prefix")

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.manifests = f"{prefix}spaces/"

    def pages(self, space_id: str) -> str:
        """What the names of a key space's pages begin with."""
        return f"{self.prefix}{space_id}/"

    def page(self, space_id: str, page_hash: str) -> str:
        return f"{self.prefix}{space_id}/{page_hash[:2]}/{page_hash}"

    def manifest(self, space_id: str) -> str:
        return f"{self.manifests}{space_id}.json"

    def is_page(self, space_id: str, name: str) -> bool:
        """Return True where `name` is that of a page of the key space."""
        root = self.pages(space_id)
        return name.startswith(root) and _PAGE.fullmatch(name, len(root)) is not None

    def is_manifest(self, name: str) -> bool:
        root = self.manifests
        return name.startswith(root) and _MANIFEST.fullmatch(name, len(root)) is not None
